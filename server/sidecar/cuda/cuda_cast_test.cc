// These tests check that a node with GPUs sends and gets the same bytes as one without, and that it
// accesses workers' memory only when their streams have arrived.
#include "server/sidecar/cuda/cuda_cast.h"

#include <gmock/gmock.h>

#include "core/base/codec_policy.h"
#include "core/base/protocol.h"
#include "server/sidecar/bucket/make_codecs.h"
#include "server/sidecar/cuda/node_rounds.h"

namespace thalweg::cuda_cast_test {
namespace {

const BucketLayout kLayout{DType::kFloat32, {{"a", {1500}}, {"b", {3, 700}}, {"c", {1}}}};

Floats RandomGradient(uint64_t seed) {
  Floats values = RandomFloats(seed, kLayout.Elems());
  values[7] = std::numeric_limits<float>::infinity();
  values[8] = std::nanf("");
  return values;
}

std::vector<Floats> RandomGradients(uint64_t seed, size_t workers) {
  std::vector<Floats> gradients;
  for (size_t rank = 0; rank < workers; ++rank) gradients.push_back(RandomGradient(seed + rank));
  return gradients;
}

class CudaCastTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<DenseCodec> Codec(BucketMemory& memory, bool is_alone = false) {
    return MakeDenseCodec(kLayout, memory, {{3}, kMinChunkBytes, 1, is_alone}, {policy_});
  }

  const CodecPolicy policy_ = *CodecPolicy::Parse(GetParam());
  FakeGpus gpus_{1};
  CudaDevice device_{gpus_.All(), nullptr};
};

TEST_P(CudaCastTest, SendsAndGetsTheBytesOfANodeWithoutGpus) {
  for (const uint32_t workers : {1u, 3u}) {
    GpuNode gpu(gpus_, device_, kLayout, workers);
    CpuNode cpu(kLayout, workers);
    const auto gpu_codec = Codec(gpu.memory());
    const auto cpu_codec = Codec(cpu.memory());
    for (uint64_t number = 1; number <= 3; ++number) {
      const auto gradients = RandomGradients(number * 10, workers);
      gpu.Make(gradients);
      cpu.Make(gradients);
      const auto sent = RunRound(*gpu_codec, gpu.memory());
      ASSERT_TRUE(sent.ok()) << sent.status();
      EXPECT_EQ(*sent, *RunRound(*cpu_codec, cpu.memory())) << workers << " workers";
      for (uint32_t rank = 0; rank < workers; ++rank) {
        EXPECT_TRUE(SameBits(gpu.Result(rank), cpu.Result())) << "rank " << rank;
      }
    }
  }
}

TEST_P(CudaCastTest, NodeThatIsAloneReducesWithoutLeavingTheGpu) {
  GpuNode gpu(gpus_, device_, kLayout, 2);
  CpuNode cpu(kLayout, 2);
  gpu.Make(RandomGradients(1, 2));
  cpu.Make(RandomGradients(1, 2));
  FoldPool pool(1);
  for (BucketMemory* memory : {&gpu.memory(), &cpu.memory()}) {
    const auto codec = Codec(*memory, /*is_alone=*/true);
    MemoryGradient gradient(*memory);
    ASSERT_TRUE(memory->BeginRound().ok());
    ASSERT_TRUE(codec->Begin(pool, gradient).ok());
    uint64_t nonfinite = 0;
    for (uint32_t chunk = 0; chunk < codec->part().plan.Count(); ++chunk) {
      nonfinite += *codec->Reduce(chunk, gradient);
    }
    EXPECT_EQ(nonfinite, 2u);
    ASSERT_TRUE(memory->EndRound().ok());
    gpus_.Settle();
  }
  EXPECT_TRUE(SameBits(gpu.Result(1), cpu.Result()));
  EXPECT_EQ(gpus_[0].copied_bytes(FakeRuntime::Call::kCopyToHost), sizeof(uint64_t));
}

TEST_P(CudaCastTest, NothingIsReadBeforeTheWorkersStreamGetsThere) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory());
  FoldPool pool(1);
  MemoryGradient gradient(gpu.memory());
  gpus_[0].Hold(gpu.worker(0).stream());
  gpu.Make({RandomGradient(5)});
  ASSERT_TRUE(gpu.memory().BeginRound().ok());
  ASSERT_TRUE(codec->Begin(pool, gradient).ok());
  gpus_.Settle();
  EXPECT_EQ(gpu.memory().WaitInput(0, 1, Now()), 0u);
  EXPECT_EQ(gpus_[0].copied_bytes(FakeRuntime::Call::kCopyToHost), 0u);
  gpus_[0].Release(gpu.worker(0).stream());
  codec->part().BeginRound();
  const auto share = codec->Encode(codec->part(), 0, gradient);
  ASSERT_TRUE(share.ok()) << share.status();
  CpuNode cpu(kLayout, 1);
  cpu.Make({RandomGradient(5)});
  const auto cpu_codec = Codec(cpu.memory());
  const Sent expected = *RunRound(*cpu_codec, cpu.memory());
  EXPECT_EQ(std::memcmp(share->data(), expected.data(), share->size()), 0);
}

TEST_P(CudaCastTest, ChunkIsSentBeforeTheNextIsOnTheHost) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory());
  FoldPool pool(1);
  MemoryGradient gradient(gpu.memory());
  gpu.Make({RandomGradient(6)});
  gpus_[0].LimitCopies(FakeRuntime::Call::kCopyToHost, 1);
  ASSERT_TRUE(gpu.memory().BeginRound().ok());
  ASSERT_TRUE(codec->Begin(pool, gradient).ok());
  codec->part().BeginRound();
  ASSERT_GT(codec->part().plan.Count(), 1u);
  const auto first = codec->Encode(codec->part(), 0, gradient);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(gpus_[0].copied_bytes(FakeRuntime::Call::kCopyToHost), first->size());
  gpus_[0].LimitCopies(FakeRuntime::Call::kCopyToHost, std::nullopt);
  EXPECT_TRUE(codec->Encode(codec->part(), 1, gradient).ok());
}

TEST_P(CudaCastTest, ChunkThatHasComeGoesToTheGpuBeforeTheNextHasCome) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory());
  FoldPool pool(1);
  MemoryGradient gradient(gpu.memory());
  gpu.Make({RandomGradient(6)});
  ASSERT_TRUE(gpu.memory().BeginRound().ok());
  ASSERT_TRUE(codec->Begin(pool, gradient).ok());
  Part& part = codec->part();
  part.BeginRound();
  ASSERT_GT(part.plan.Count(), 1u);
  const auto share = codec->Encode(part, 0, gradient);
  ASSERT_TRUE(share.ok()) << share.status();
  RoundResult result;
  result.elems = part.plan.Elems(0);
  result.payload = Payload(*share, nullptr);
  ASSERT_TRUE(codec->Decode(part, result).ok());
  gpus_.Settle();
  EXPECT_EQ(gpus_[0].copied_bytes(FakeRuntime::Call::kCopyToDevice), share->size());
}

TEST_P(CudaCastTest, WorkersFindTheResultOnlyWhenItIsComplete) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory());
  gpu.Make({RandomGradient(1)});
  ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
  const Floats first = gpu.Result();
  gpu.Make({RandomGradient(2)});
  FoldPool pool(1);
  MemoryGradient gradient(gpu.memory());
  ASSERT_TRUE(gpu.memory().BeginRound().ok());
  ASSERT_TRUE(codec->Begin(pool, gradient).ok());
  codec->part().BeginRound();
  RoundResult result;
  std::vector<std::span<const std::byte>> shares;
  for (uint32_t chunk = 0; chunk < codec->part().plan.Count(); ++chunk) {
    shares.push_back(*codec->Encode(codec->part(), chunk, gradient));
  }
  // From here on the sidecar's stream is slow.
  const DeviceStream lane = static_cast<CudaMemory&>(gpu.memory()).home().stream();
  gpus_[0].Hold(lane);
  for (uint32_t chunk = 0; chunk < shares.size(); ++chunk) {
    result.id.chunk = chunk;
    result.elems = codec->part().plan.Elems(chunk);
    result.payload = Payload(shares[chunk], nullptr);
    ASSERT_TRUE(codec->Decode(codec->part(), result).ok());
  }
  ASSERT_TRUE(gpu.memory().EndRound().ok());
  bool fetched = false;
  gpu.worker(0).WaitForResult(gpu.memory().ResultFor(0), &fetched);
  gpus_.Settle();
  EXPECT_FALSE(fetched);
  gpus_[0].Release(lane);
  gpus_.Settle();
  EXPECT_TRUE(fetched);
  EXPECT_FALSE(SameBits(gpu.Result(), first));
}

TEST_P(CudaCastTest, ResultOfTheWrongSizeIsRefused) {
  GpuNode gpu(gpus_, device_, kLayout, 1);
  const auto codec = Codec(gpu.memory());
  gpu.Make({RandomGradient(5)});
  ASSERT_TRUE(RunRound(*codec, gpu.memory()).ok());
  const std::vector<std::byte> bytes(11);
  RoundResult result;
  result.elems = codec->part().plan.Elems(0);
  result.payload = Payload(bytes, nullptr);
  EXPECT_EQ(codec->Decode(codec->part(), result).code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaCastTest, ::testing::Values("fp32", "fp16", "bf16"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace thalweg::cuda_cast_test
