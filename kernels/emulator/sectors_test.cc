// These tests count what kernels' wide accesses cost a GPU's memory. A sector that two instructions
// write in halves costs as much as two.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/cast/cast_cuda.h"
#include "kernels/codec/block_cuda.h"
#include "kernels/launch/access_log.h"
#include "kernels/launch/emulator.h"
#include "kernels/launch/pack.h"
#include "kernels/launch/test_device.h"
#include "kernels/optim/optim_cuda_test_util.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg::sectors_test {
namespace {

constexpr uint64_t kElems = 32 * 1024;
constexpr uint64_t kSectorBytes = 32;

template <class Work>
Sectors Count(const Work& work) {
  AccessLog log;
  Emulator::Get().SetAccessLog(&log);
  const absl::Status status = work();
  Emulator::Get().SetAccessLog(nullptr);
  EXPECT_TRUE(status.ok()) << status;
  return log.sectors();
}

void ExpectEachByteOnce(const Sectors& sectors, uint64_t read, uint64_t written) {
  EXPECT_EQ(sectors.read, read / kSectorBytes);
  EXPECT_EQ(sectors.written, written / kSectorBytes);
  EXPECT_EQ(sectors.written_in_part, 0u);
}

TEST(AccessLogTest, HalvesOfASectorCountOnceIfOneInstructionOfAWarpHasBoth) {
  alignas(32) std::byte memory[64] = {};
  AccessLog log;
  log.Note(0, memory, 16, true);
  log.Note(1, memory + 16, 16, true);
  log.EndBlock();
  EXPECT_EQ(log.sectors().written, 1u);
  EXPECT_EQ(log.sectors().written_in_part, 0u);
  log.Note(0, memory, 16, true);  // one lane, two instructions
  log.Note(0, memory + 16, 16, true);
  log.Note(1, memory + 32, 16, true);
  log.Note(1, memory + 48, 16, true);
  log.EndBlock();
  EXPECT_EQ(log.sectors().written, 1u + 4u);
  EXPECT_EQ(log.sectors().written_in_part, 4u);
  log.Note(0, memory, 16, false);
  log.Note(32, memory, 16, false);  // another warp
  log.EndBlock();
  EXPECT_EQ(log.sectors().read, 2u);
}

TEST(SectorsTest, CastsWriteEachSectorOnce) {
  const DeviceBuffer in(std::vector<std::byte>(kElems * 4));
  const DeviceBuffer out(kElems * 4);
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    ExpectEachByteOnce(Count([&] {
                         return CastOnDevice(nullptr, half, in.Data(), DType::kFloat32, out.Data(),
                                             kElems);
                       }),
                       kElems * 2, kElems * 4);
    // Threads read 32 bytes in two halves, of which the second is in the cache.
    const Sectors narrowing = Count([&] {
      return CastOnDevice(nullptr, DType::kFloat32, in.Data(), half, out.Data(), kElems);
    });
    ExpectEachByteOnce(narrowing, 2 * kElems * 4, kElems * 2);
  }
}

TEST(SectorsTest, MeansReadAndWriteEachSectorOnce) {
  const DeviceBuffer in(std::vector<std::byte>(kElems * 4));
  const DeviceBuffer out(kElems * 4);
  const DeviceBuffer nonfinite(std::vector<std::byte>(sizeof(uint64_t)));
  const std::vector<const void*> inputs(3, in.Data());
  const std::vector<float> weights(3, 1.0f);
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    ExpectEachByteOnce(Count([&] {
                         return FoldMeanOnDevice(nullptr, inputs, weights, 3, type, type,
                                                 out.Data(), kElems, nonfinite.As<uint64_t>());
                       }),
                       3 * kElems * SizeOf(type), kElems * SizeOf(type));
  }
}

TEST(SectorsTest, BlocksAreDecodedInWholeSectors) {
  const DeviceBuffer in(std::vector<std::byte>(MaxEncodedBytes(WireFormat::kInt8, kElems)));
  const DeviceBuffer out(kElems * 4);
  ExpectEachByteOnce(Count([&] {
                       return DecodeBlocksOnDevice(nullptr, WireFormat::kInt8, in.Data(), kElems,
                                                   out.As<float>());
                     }),
                     0, kElems * 4);  // codes are read in words
}

// Parameters and both moments in float32, gradients and a copy of the parameters in float16.
class OptimSectorsTest : public ::testing::Test {
 protected:
  OptimMemory memory() const { return {table_.Data(), workspace_.Span()}; }
  StepInputs inputs() const { return {nullptr, found_inf_.As<float>(), squares_.As<double>()}; }

  std::mt19937_64 random_{3};
  TwinTensor tensor_{
      {.elems = kElems, .grad = DType::kFloat16, .copy = DType::kFloat16}, 2, random_};
  const OptimPlan plan_ = OptimPlan::Make(std::vector<DeviceTensor>{tensor_.OnDevice()}).value();
  const DeviceBuffer table_{std::vector<std::byte>(plan_.table().begin(), plan_.table().end())};
  const DeviceBuffer workspace_{plan_.workspace_bytes()};
  const DeviceBuffer found_inf_{std::vector<float>{0}};
  const DeviceBuffer squares_{std::vector<double>{0}};
};

TEST_F(OptimSectorsTest, AdamReadsAndWritesEachSectorOnce) {
  const DeviceBuffer settings(std::vector<AdamSettings>(1));
  ExpectEachByteOnce(Count([&] {
                       return StepAdamOnDevice(nullptr, plan_, memory(),
                                               settings.As<AdamSettings>(), inputs());
                     }),
                     kElems * (4 + 2 + 8), kElems * (4 + 8 + 2));
}

TEST_F(OptimSectorsTest, LambReadsParametersAndMomentsTwiceAndWritesEachSectorOnce) {
  const DeviceBuffer settings(std::vector<LambSettings>(1));
  ExpectEachByteOnce(Count([&] {
                       return StepLambOnDevice(nullptr, plan_, memory(),
                                               settings.As<LambSettings>(), inputs());
                     }),
                     kElems * (4 + 2 + 8 + 4 + 8), kElems * (8 + 4 + 2));
}

}  // namespace
}  // namespace thalweg::sectors_test
