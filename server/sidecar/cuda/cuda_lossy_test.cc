// Tests that the lossy formats on a GPU send, get and keep the same bits as in host memory.
#include "server/sidecar/cuda/cuda_lossy.h"

#include <gmock/gmock.h>

#include "core/base/codec_policy.h"
#include "core/base/protocol.h"
#include "server/sidecar/cuda/node_rounds.h"

namespace thalweg::cuda_lossy_test {
namespace {

// Tensors 0, 2 and 3 are compressed: two stretches, which no chunk or block divides, so that there
// is padding between tensors.
const BucketLayout kLayout{DType::kFloat32,
                           {{"a", {3003}}, {"plain", {501}}, {"b", {13}}, {"c", {140, 31}}}};
const BucketLayout kHalf{DType::kFloat16, kLayout.tensors};
// Blocks divide all tensors but the last.
const BucketLayout kAligned{DType::kFloat32,
                            {{"a", {2048}}, {"plain", {1024}}, {"b", {1024}}, {"c", {140, 31}}}};
const std::vector<uint32_t> kMembers = {0, 2, 3};
const std::vector<uint32_t> kAll = {0, 1, 2, 3};

class CudaLossyTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<BucketCodec> Codec(BucketMemory& memory, ParameterStates& states,
                                     const std::vector<uint32_t>& members = kMembers,
                                     const BucketLayout& layout = kLayout) {
    const CodecPlace place{{3}, kMinChunkBytes, 1};
    return *memory.MakeLossy(TensorSet(layout, members), place, 4, spec_, states);
  }
  static std::vector<Floats> Gradients(uint64_t seed, uint32_t workers,
                                       const BucketLayout& layout = kLayout) {
    std::vector<Floats> gradients;
    for (uint32_t rank = 0; rank < workers; ++rank) {
      gradients.push_back(RandomFloats(seed + rank, layout.Elems()));
    }
    if (seed % 20 == 0) gradients[0][3600] = std::nanf("");
    return gradients;
  }
  static void ExpectSameStates(const ParameterStates& a, const ParameterStates& b) {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, state] : a) {
      EXPECT_TRUE(SameBits(state->residual, b.at(name)->residual)) << name;
    }
  }

  const CodecSpec spec_ = *CodecSpec::Parse(GetParam());
  FakeGpus gpus_{1};
  CudaDevice device_{gpus_.All(), nullptr};
  ParameterStates gpu_states_;
  ParameterStates cpu_states_;
};

TEST_P(CudaLossyTest, SendsGetsAndKeepsTheBitsOfANodeWithoutGpus) {
  for (const auto& [layout, workers, members] :
       {std::tuple(kLayout, 1u, kAll), std::tuple(kLayout, 1u, kMembers),
        std::tuple(kLayout, 3u, kMembers), std::tuple(kHalf, 1u, kAll),
        std::tuple(kAligned, 1u, kAll)}) {
    gpu_states_.clear();
    cpu_states_.clear();
    GpuNode gpu(gpus_, device_, layout, workers);
    CpuNode cpu(layout, workers);
    const auto gpu_codec = Codec(gpu.memory(), gpu_states_, members, layout);
    const auto cpu_codec = Codec(cpu.memory(), cpu_states_, members, layout);
    for (uint64_t seed = 10; seed <= 30; seed += 10) {
      gpu.Make(Gradients(seed, workers, layout));
      cpu.Make(Gradients(seed, workers, layout));
      const auto sent = RunRound(*gpu_codec, gpu.memory(), layout.dtype);
      ASSERT_TRUE(sent.ok()) << sent.status();
      EXPECT_EQ(*sent, *RunRound(*cpu_codec, cpu.memory(), layout.dtype)) << workers << " workers";
      const Floats result = gpu.Result(workers - 1);
      const Floats expected = cpu.Result();
      const TensorSet set(layout, members);
      for (const auto& piece : set.BucketPieces(0, set.Elems())) {
        EXPECT_EQ(std::memcmp(result.data() + piece.offset, expected.data() + piece.offset,
                              piece.elems * sizeof(float)),
                  0);
      }
    }
    ASSERT_TRUE(gpu_codec->SaveStates().ok());
    ExpectSameStates(gpu_states_, cpu_states_);
    EXPECT_GT(cpu_codec->loss().whole, 0);
    EXPECT_NEAR(gpu_codec->loss().whole / cpu_codec->loss().whole, 1, 1e-11);
    EXPECT_NEAR(gpu_codec->loss().residual / cpu_codec->loss().residual, 1, 1e-11);
  }
}

TEST_P(CudaLossyTest, StatesThatWereSavedGoOnInAnotherLayout) {
  CpuNode cpu(kLayout, 1);
  const auto cpu_codec = Codec(cpu.memory(), cpu_states_);
  cpu.Make(Gradients(10, 1));
  ASSERT_TRUE(RunRound(*cpu_codec, cpu.memory()).ok());
  Sent expected;
  cpu.Make(Gradients(30, 1));
  expected = *RunRound(*cpu_codec, cpu.memory());
  {
    GpuNode gpu(gpus_, device_, kLayout, 1);
    const auto codec = Codec(gpu.memory(), gpu_states_);
    gpu.Make(Gradients(10, 1));
    ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
    ASSERT_TRUE(codec->SaveStates().ok());
  }
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory(), gpu_states_);
  gpu.Make(Gradients(30, 1));
  EXPECT_EQ(*RunRound(*codec, gpu.memory()), expected);
}

TEST_P(CudaLossyTest, ResidualFollowsTheLossScaleAsOnANodeWithoutGpus) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  CpuNode cpu(kLayout, 1);
  const auto gpu_codec = Codec(gpu.memory(), gpu_states_);
  const auto cpu_codec = Codec(cpu.memory(), cpu_states_);
  uint64_t seed = 0;
  for (const double scale : {8.0, 8.0, 4.0, 16.0}) {
    gpu.Make(Gradients(++seed, 1));
    cpu.Make(Gradients(seed, 1));
    ASSERT_TRUE(gpu_codec->FollowLossScale(scale).ok());
    ASSERT_TRUE(cpu_codec->FollowLossScale(scale).ok());
    EXPECT_EQ(*RunRound(*gpu_codec, gpu.memory()), *RunRound(*cpu_codec, cpu.memory())) << seed;
  }
  ASSERT_TRUE(gpu_codec->SaveStates().ok());
  ExpectSameStates(gpu_states_, cpu_states_);
}

TEST_P(CudaLossyTest, StatesThatWereLoadedAreTakenUp) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  CpuNode cpu(kLayout, 1);
  const auto gpu_codec = Codec(gpu.memory(), gpu_states_);
  const auto cpu_codec = Codec(cpu.memory(), cpu_states_);
  gpu.Make(Gradients(10, 1));
  ASSERT_TRUE(RunRound(*gpu_codec, gpu.memory()).ok());
  ASSERT_TRUE(gpu_codec->SaveStates().ok());
  for (ParameterStates* states : {&gpu_states_, &cpu_states_}) {
    for (const char* name : {"a", "b", "c"}) {
      (*states)[name]->residual =
          RandomFloats(5, kLayout.tensors[name[0] == 'a'   ? 0
                                          : name[0] == 'b' ? 2
                                                           : 3]
                              .Elems());
    }
  }
  gpu.Make(Gradients(30, 1));
  cpu.Make(Gradients(30, 1));
  EXPECT_EQ(*RunRound(*gpu_codec, gpu.memory()), *RunRound(*cpu_codec, cpu.memory()));
}

// Like on a node without GPUs, the size is only known here after a round.
TEST_P(CudaLossyTest, StateOfAnotherSizeThatWasLoadedBeforeTheFirstRoundIsBroughtToSize) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  CpuNode cpu(kLayout, 1);
  const auto gpu_codec = Codec(gpu.memory(), gpu_states_);
  const auto cpu_codec = Codec(cpu.memory(), cpu_states_);
  for (ParameterStates* states : {&gpu_states_, &cpu_states_}) {
    (*states)["a"]->residual = RandomFloats(5, 11);
  }
  gpu.Make(Gradients(30, 1));
  cpu.Make(Gradients(30, 1));
  EXPECT_EQ(*RunRound(*gpu_codec, gpu.memory()), *RunRound(*cpu_codec, cpu.memory()));
}

TEST_P(CudaLossyTest, ResultThatIsNoSuchChunkIsRefused) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory(), gpu_states_);
  gpu.Make(Gradients(10, 1));
  ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
  const Part& part = *codec->FindPart(4);
  const std::vector<std::byte> bytes(11, std::byte{0x7f});
  RoundResult result;
  result.elems = part.plan.Elems(0);
  result.payload = Payload(bytes, nullptr);
  EXPECT_EQ(codec->Decode(part, result).code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaLossyTest,
                         ::testing::Values("int8", "onebit", "topk:0.01", "topk:0.5"),
                         [](const auto& param) {
                           std::string name(param.param);
                           for (char& c : name) c = c == ':' || c == '.' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace thalweg::cuda_lossy_test
