// These tests need a GPU: steps that a graph has recorded, and tensors whose number of elements
// does not fit into 32 bits.
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "kernels/launch/test_device.h"
#include "kernels/optim/optim_cuda.h"

namespace thalweg::optim_gpu_test {
namespace {

class OptimGpuTest : public DeviceTest {
 protected:
  void TearDown() override {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // Records what `work` queues.
  template <class Work>
  void Record(const Work& work) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    const absl::Status status = work(stream_);
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(cudaGraphInstantiate(&graph_, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  void Replay() {
    ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

std::vector<std::byte> BytesOf(float value) {
  std::vector<std::byte> bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

TEST_F(OptimGpuTest, RecordedStepReadsScaleInfinityAndRateWhenItIsReplayed) {
  const std::vector<float> ones(5000, 1.0f);
  const DeviceBuffer param(ones);
  const DeviceBuffer grad(ones);
  DeviceTensor tensor;
  tensor.param = param.Data();
  tensor.grad = grad.Data();
  tensor.elems = ones.size();
  const OptimPlan plan = OptimPlan::Make(std::vector<DeviceTensor>{tensor}).value();
  const DeviceBuffer table(std::vector<std::byte>(plan.table().begin(), plan.table().end()));
  const DeviceBuffer workspace(plan.workspace_bytes());
  DeviceBuffer rate(std::vector<float>{0.5f});
  DeviceBuffer scale(std::vector<float>{1.0f});
  DeviceBuffer found_inf(std::vector<float>{0.0f});
  SgdSettings settings;
  settings.lr_at = rate.As<float>();
  const DeviceBuffer on_device(std::vector<SgdSettings>{settings});
  Record([&](CudaStream stream) {
    return StepSgdOnDevice(stream, plan, {table.Data(), workspace.Span()},
                           on_device.As<SgdSettings>(),
                           {.grad_scale = scale.As<float>(), .found_inf = found_inf.As<float>()});
  });
  const auto expect_all = [&](float expected) {
    for (const float value : param.ContentAs<float>()) ASSERT_EQ(value, expected);
  };
  expect_all(1.0f);
  Replay();
  expect_all(0.5f);
  scale.Fill(BytesOf(4.0f));
  Replay();
  expect_all(0.375f);
  rate.Fill(BytesOf(1.0f));
  Replay();
  expect_all(0.125f);
  found_inf.Fill(BytesOf(1.0f));
  Replay();
  expect_all(0.125f);
}

TEST_F(OptimGpuTest, ElementsBeyond32BitsAreUpdated) {
  constexpr uint64_t kElems = (uint64_t{1} << 32) + 4096 * 5 + 3;
  constexpr uint64_t kBytes = 2 * kElems;
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
  if (free_bytes < 2 * kBytes + (uint64_t{1} << 30)) {
    GTEST_SKIP() << "not enough GPU memory: two arrays of " << kBytes << " bytes, got "
                 << free_bytes;
  }
  const DeviceBuffer param(kBytes);
  const DeviceBuffer grad(kBytes);
  ASSERT_EQ(cudaMemset(param.Data(), 0, kBytes), cudaSuccess);
  ASSERT_EQ(cudaMemset(grad.Data(), 0x3c, kBytes), cudaSuccess);  // 0x3c3c of fp16 is 1.05859375
  DeviceTensor tensor;
  tensor.param = param.Data();
  tensor.grad = grad.Data();
  tensor.elems = kElems;
  tensor.param_type = tensor.grad_type = DType::kFloat16;
  const OptimPlan plan = OptimPlan::Make(std::vector<DeviceTensor>{tensor}).value();
  const DeviceBuffer table(std::vector<std::byte>(plan.table().begin(), plan.table().end()));
  const DeviceBuffer workspace(plan.workspace_bytes());
  SgdSettings settings;
  settings.lr = 1;
  const DeviceBuffer on_device(std::vector<SgdSettings>{settings});
  const DeviceBuffer squares(sizeof(double));
  const OptimMemory memory = {table.Data(), workspace.Span()};
  ASSERT_TRUE(GradSquaresOnDevice(nullptr, plan, memory, squares.As<double>(), nullptr).ok());
  ASSERT_TRUE(StepSgdOnDevice(nullptr, plan, memory, on_device.As<SgdSettings>(), {}).ok());
  ASSERT_TRUE(FinishDevice().ok());
  // Squares have 17 bits and there are about 2^32, so that all sums are exact.
  EXPECT_EQ(squares.ContentAs<double>()[0], static_cast<double>(kElems) * 1.05859375 * 1.05859375);
  for (const uint64_t at : {uint64_t{0}, (uint64_t{1} << 31) - 1, uint64_t{1} << 31,
                            (uint64_t{1} << 32) - 1, uint64_t{1} << 32, kElems - 1}) {
    uint16_t bits = 0;
    ASSERT_EQ(cudaMemcpy(&bits, param.Data() + 2 * at, sizeof(bits), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(bits, 0xbc3c) << "element " << at;
  }
}

}  // namespace
}  // namespace thalweg::optim_gpu_test
