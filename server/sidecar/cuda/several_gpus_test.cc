// These tests have workers of a node on several GPUs; a fake replaces NCCL.
#include <gmock/gmock.h>

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/base/codec_policy.h"
#include "core/base/protocol.h"
#include "core/base/thread.h"
#include "core/device/fake_group.h"
#include "kernels/cast/scalar.h"
#include "server/sidecar/bucket/make_codecs.h"
#include "server/sidecar/cuda/cuda_device.h"
#include "server/sidecar/cuda/cuda_memory.h"
#include "server/sidecar/cuda/node_rounds.h"

namespace thalweg::several_gpus_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Places = std::vector<size_t>;  // workers' GPUs
constexpr uint64_t kElems = 3601;
// Waits that must time out take this long, which is more than emulated kernels take.
constexpr Duration kShort = std::chrono::seconds(1);

uint16_t Narrow(DType dtype, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return dtype == DType::kFloat16 ? Fp16FromFp32(bits) : BFloat16FromFp32(bits);
}

double Widen(DType dtype, uint16_t bits) {
  return std::bit_cast<float>(dtype == DType::kFloat16 ? Fp32FromFp16(bits)
                                                       : Fp32FromBFloat16(bits));
}

// Returns half a unit in the last place of 1.
double RoundOff(DType dtype) {
  return std::ldexp(1, dtype == DType::kFloat32 ? -24 : dtype == DType::kFloat16 ? -11 : -8);
}

// Gpus are a sidecar's GPUs, and the groups that it has made among them.
class Gpus {
 public:
  explicit Gpus(int count) : gpus_(count) {}
  ~Gpus() {
    for (const auto& group : groups_) EXPECT_THAT(group->violations(), IsEmpty());
  }
  FakeGpus& all() { return gpus_; }
  CudaDevice& device() { return device_; }
  FakeGroup& group(size_t i) { return *groups_.at(i); }
  size_t groups() const { return groups_.size(); }
  // Makes groups hang that are made from now on.
  void Hang() { hang_ = true; }
  void ExpectNothingLeft() {
    for (const auto& gpu : gpus_.runtimes()) {
      EXPECT_EQ(gpu->allocated(), 0u);
      EXPECT_EQ(gpu->opened(), 0u);
    }
  }

 private:
  FakeGpus gpus_;
  bool hang_ = false;
  std::vector<std::shared_ptr<FakeGroup>> groups_;
  CudaDevice device_{gpus_.All(), [this](const auto& members) {
                       std::vector<FakeRuntime*> fakes;
                       for (const auto& gpu : members) {
                         fakes.push_back(static_cast<FakeRuntime*>(gpu.get()));
                       }
                       groups_.push_back(std::make_shared<FakeGroup>(std::move(fakes)));
                       if (hang_) groups_.back()->Hang();
                       return groups_.back();
                     }};
};

// A Bucket is sent uncompressed.
class Bucket {
 public:
  Bucket(Gpus& gpus, const Places& places, DType dtype = DType::kFloat32, uint32_t index = 0,
         Duration patience = kPatience)
      : gpus_(gpus), layout_{dtype, {{"a", {1500}}, {"b", {3, 700}}, {"c", {1}}}} {
    const auto workers = static_cast<uint32_t>(places.size());
    memory_ = *gpus.device().MakeMemory({{index}, layout_, dtype, workers, patience});
    for (const size_t place : places) {
      workers_.push_back(
          std::make_unique<FakeGpuWorker>(gpus.all()[place], kElems * SizeOf(dtype)));
    }
  }
  // Registers the shares in that order of ranks.
  void Share(const std::vector<uint32_t>& ranks) {
    for (const uint32_t rank : ranks) {
      ASSERT_TRUE(memory_->AddInput(rank, UniqueFd(), workers_[rank]->Share()).ok());
    }
    codec_ = MakeDenseCodec(layout_, *memory_, {{3}, kMinChunkBytes, 1}, {policy_});
  }
  void Share() {
    std::vector<uint32_t> ranks(workers_.size());
    for (uint32_t rank = 0; rank < ranks.size(); ++rank) ranks[rank] = rank;
    Share(ranks);
  }
  template <class T>
  void Make(const std::vector<std::vector<T>>& gradients) {
    for (size_t rank = 0; rank < workers_.size(); ++rank) workers_[rank]->Make(gradients[rank]);
  }
  void MakeAny() {
    for (const auto& worker : workers_) worker->Make(RandomFloats(1, kElems));
  }
  absl::Status Run() {
    const absl::Status status = RunRound(*codec_, *memory_).status();
    if (status.ok()) gpus_.all().Settle();
    return status;
  }
  template <class T>
  std::vector<T> Result(uint32_t rank) {
    return workers_[rank]->Fetch<T>(memory_->ResultFor(rank), kElems);
  }
  FakeGpuWorker& worker(size_t rank) { return *workers_[rank]; }
  CudaMemory& memory() { return static_cast<CudaMemory&>(*memory_); }
  DenseCodec& codec() { return *codec_; }

 private:
  Gpus& gpus_;
  const BucketLayout layout_;
  const CodecPolicy policy_ = *CodecPolicy::Parse("fp32");
  std::vector<std::unique_ptr<FakeGpuWorker>> workers_;
  std::unique_ptr<BucketMemory> memory_;
  std::unique_ptr<DenseCodec> codec_;
};

struct MeanCase {
  const char* name;
  Places places;
  size_t gpus;
  DType dtype;
};

class SeveralGpusMeanTest : public ::testing::TestWithParam<MeanCase> {
 protected:
  // Makes one gradient per worker, and returns them and their values in double.
  template <class T>
  std::vector<std::vector<T>> MakeGradients(uint64_t seed) {
    std::vector<std::vector<T>> gradients(GetParam().places.size());
    exact_.assign(gradients.size(), {});
    for (size_t rank = 0; rank < gradients.size(); ++rank) {
      for (const float value : RandomFloats(seed + rank, kElems)) {
        if constexpr (std::is_same_v<T, float>) {
          gradients[rank].push_back(value);
          exact_[rank].push_back(value);
        } else {
          gradients[rank].push_back(Narrow(GetParam().dtype, value));
          exact_[rank].push_back(Widen(GetParam().dtype, gradients[rank].back()));
        }
      }
    }
    return gradients;
  }

  // Each GPU rounds its share once, so that is RoundOff of the shares' sum S of magnitudes; so is
  // each of the additions of NCCL, whose partial sums are at most S. Before, a GPU adds up its n
  // shares and divides in fp32: n + 1 roundings. In fp16, numbers below normal are off by at most
  // half of 2^-24 each time. 1 % more covers the products of these.
  void ExpectMean(const std::vector<double>& got) {
    const MeanCase& param = GetParam();
    const auto workers = static_cast<double>(param.places.size());
    const double relative = static_cast<double>(param.gpus) * RoundOff(param.dtype) +
                            (workers + 1) * RoundOff(DType::kFloat32);
    const double absolute =
        param.dtype == DType::kFloat16 ? static_cast<double>(param.gpus) * std::ldexp(1, -25) : 0;
    for (size_t i = 0; i < kElems; ++i) {
      double mean = 0;
      double magnitudes = 0;
      for (const auto& gradient : exact_) {
        mean += gradient[i] / workers;
        magnitudes += std::fabs(gradient[i]) / workers;
      }
      ASSERT_NEAR(got[i], mean, 1.01 * (relative * magnitudes + absolute)) << "element " << i;
    }
  }

  template <class T>
  void RunRounds() {
    Gpus gpus(3);
    Bucket bucket(gpus, GetParam().places, GetParam().dtype, 1);
    bucket.Share();
    for (const uint64_t seed : {10u, 20u}) {
      bucket.Make(MakeGradients<T>(seed));
      ASSERT_TRUE(bucket.Run().ok());
      const std::vector<T> result = bucket.Result<T>(0);
      std::vector<double> got;
      for (const T value : result) {
        if constexpr (std::is_same_v<T, float>) {
          got.push_back(value);
        } else {
          got.push_back(Widen(GetParam().dtype, value));
        }
      }
      ExpectMean(got);
      for (uint32_t rank = 1; rank < exact_.size(); ++rank) {
        EXPECT_EQ(std::memcmp(bucket.Result<T>(rank).data(), result.data(), kElems * sizeof(T)), 0)
            << "rank " << rank;
      }
    }
  }

  std::vector<std::vector<double>> exact_;
};

TEST_P(SeveralGpusMeanTest, AllWorkersGetTheSameBitsOfTheMean) {
  GetParam().dtype == DType::kFloat32 ? RunRounds<float>() : RunRounds<uint16_t>();
}

INSTANTIATE_TEST_SUITE_P(Gpus, SeveralGpusMeanTest,
                         ::testing::Values(MeanCase{"Two", {0, 1}, 2, DType::kFloat32},
                                           MeanCase{"TwoFp16", {0, 1}, 2, DType::kFloat16},
                                           MeanCase{"TwoBf16", {0, 1}, 2, DType::kBFloat16},
                                           MeanCase{"Three", {0, 1, 2}, 3, DType::kFloat32},
                                           MeanCase{"ThreeFp16", {2, 0, 1}, 3, DType::kFloat16},
                                           MeanCase{"ThreeBf16", {0, 1, 2}, 3, DType::kBFloat16},
                                           MeanCase{"TwoOnOne", {0, 0, 1}, 2, DType::kFloat32},
                                           MeanCase{"TwoOnOneFp16", {0, 1, 0}, 2, DType::kFloat16},
                                           MeanCase{
                                               "TwoOnOneBf16", {1, 0, 0}, 2, DType::kBFloat16}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SeveralGpusTest, BucketsTakeTurnsInTheirHomesAndUseOneGroup) {
  Gpus gpus(3);
  for (const uint32_t index : {0u, 1u, 2u, 3u}) {
    Bucket bucket(gpus, {0, 1, 2}, DType::kFloat32, index);
    bucket.Share(index % 2 == 0 ? std::vector<uint32_t>{0, 1, 2} : std::vector<uint32_t>{2, 1, 0});
    bucket.MakeAny();
    ASSERT_TRUE(bucket.Run().ok());
    EXPECT_EQ(bucket.memory().home().gpu().number(), gpus.all()[index % 3].number());
  }
  ASSERT_EQ(gpus.groups(), 1u);
  EXPECT_THAT(gpus.group(0).roots(), ElementsAre(0, 0, 1, 1, 2, 2, 0, 0));
}

TEST(SeveralGpusTest, JobsDoNotShareAGroup) {
  Gpus gpus(2);
  const auto ours = *gpus.device().GroupOf("ours", gpus.all().All());
  EXPECT_EQ(*gpus.device().GroupOf("ours", gpus.all().All()), ours);
  EXPECT_NE(*gpus.device().GroupOf("theirs", gpus.all().All()), ours);
}

TEST(SeveralGpusTest, NothingIsSentBeforeTheStreamsOfAllGpusGetThere) {
  Gpus gpus(2);
  Bucket bucket(gpus, {0, 1});
  bucket.Share();
  gpus.all()[1].Hold(bucket.worker(1).stream());
  bucket.MakeAny();
  FoldPool pool(1);
  MemoryGradient gradient(bucket.memory());
  ASSERT_TRUE(bucket.memory().BeginRound().ok());
  ASSERT_TRUE(bucket.codec().Begin(pool, gradient).ok());
  gpus.all().Settle();
  EXPECT_EQ(bucket.memory().WaitInput(0, 1, Now()), 1u);
  EXPECT_EQ(bucket.memory().WaitInput(1, 1, Now()), 0u);
  EXPECT_EQ(gpus.all()[0].copied_bytes(FakeRuntime::Call::kCopyToHost), 0u);
  gpus.all()[1].Release(bucket.worker(1).stream());
  gpus.all().Settle();
  EXPECT_EQ(gpus.all()[0].copied_bytes(FakeRuntime::Call::kCopyToHost), kElems * sizeof(float));
}

TEST(SeveralGpusTest, WorkersFindTheResultOnlyWhenItIsOnTheirGpu) {
  Gpus gpus(2);
  Bucket bucket(gpus, {0, 1});
  bucket.Share();
  bucket.MakeAny();
  FoldPool pool(1);
  MemoryGradient gradient(bucket.memory());
  ASSERT_TRUE(bucket.memory().BeginRound().ok());
  ASSERT_TRUE(bucket.codec().Begin(pool, gradient).ok());
  gpus.all().Settle();
  gpus.all()[0].Hold(bucket.memory().home().stream());
  ASSERT_TRUE(bucket.memory().EndRound().ok());
  bool reached = false;
  bucket.worker(1).WaitForResult(bucket.memory().ResultFor(1), &reached);
  gpus.all().Settle();
  EXPECT_FALSE(reached);
  gpus.all()[0].Release(bucket.memory().home().stream());
  gpus.all().Settle();
  EXPECT_TRUE(reached);
}

TEST(SeveralGpusTest, NothingIsLeftOnAnyGpu) {
  Gpus gpus(3);
  {
    Bucket bucket(gpus, {0, 1, 2, 2});
    bucket.Share();
    bucket.MakeAny();
    ASSERT_TRUE(bucket.Run().ok());
  }
  gpus.ExpectNothingLeft();
  EXPECT_TRUE(gpus.group(0).Check().ok());
}

TEST(SeveralGpusTest, GroupThatRefusesACallEndsTheRoundAndIsReplaced) {
  Gpus gpus(2);
  {
    Bucket bucket(gpus, {0, 1});
    bucket.Share();
    bucket.MakeAny();
    ASSERT_TRUE(bucket.Run().ok());
    gpus.group(0).FailCall(absl::InternalError("NCCL: out of order"));
    bucket.MakeAny();
    EXPECT_EQ(bucket.Run().message(), "NCCL: out of order");
  }
  gpus.ExpectNothingLeft();
  Bucket next(gpus, {0, 1});
  next.Share();
  next.MakeAny();
  EXPECT_TRUE(next.Run().ok());
  EXPECT_EQ(gpus.groups(), 2u);
}

TEST(SeveralGpusTest, GroupThatMeetsAnErrorEndsTheWait) {
  Gpus gpus(2);
  {
    Bucket bucket(gpus, {0, 1});
    bucket.Share();
    bucket.MakeAny();
    ASSERT_TRUE(bucket.Run().ok());
    gpus.group(0).Hang();
    bucket.MakeAny();
    Thread nccl("nccl",
                [&gpus] { gpus.group(0).Fail(absl::InternalError("NCCL: a link is down")); });
    EXPECT_EQ(bucket.Run().message(), "NCCL: a link is down");
  }
  gpus.ExpectNothingLeft();
}

TEST(SeveralGpusTest, GroupThatHangsEndsWithTheWaitAndLeavesNothing) {
  Gpus gpus(3);
  gpus.Hang();
  {
    Bucket bucket(gpus, {0, 1, 2}, DType::kFloat32, 1, kShort);
    Bucket other(gpus, {0, 1, 2}, DType::kFloat32, 2);
    bucket.Share();
    other.Share();
    bucket.MakeAny();
    other.MakeAny();
    ASSERT_TRUE(other.memory().BeginRound().ok());  // in flight, and nobody waits for it
    EXPECT_EQ(bucket.Run().message(),
              "the GPU did not finish its work within 1 s; it may wait for another GPU of the "
              "node, of which NCCL reports no error");
  }
  gpus.ExpectNothingLeft();
}

TEST(SeveralGpusTest, WhatAnAbortHasLetThroughIsNotSent) {
  Gpus gpus(2);
  gpus.Hang();
  Bucket bucket(gpus, {0, 1});
  bucket.Share();
  bucket.MakeAny();
  FoldPool pool(1);
  MemoryGradient gradient(bucket.memory());
  ASSERT_TRUE(bucket.memory().BeginRound().ok());
  ASSERT_TRUE(bucket.codec().Begin(pool, gradient).ok());
  gpus.group(0).Fail(absl::InternalError("NCCL: a link is down"));
  gpus.group(0).Abort();
  gpus.all().Settle();
  bucket.codec().part().BeginRound();
  EXPECT_EQ(bucket.codec().Encode(bucket.codec().part(), 0, gradient).status().message(),
            "NCCL: a link is down");
}

TEST(SeveralGpusTest, BucketThatGoesWhileItsGroupHangsEndsIt) {
  Gpus gpus(2);
  gpus.Hang();
  {
    Bucket bucket(gpus, {0, 1}, DType::kFloat32, 0, kShort);
    bucket.Share();
    bucket.MakeAny();
    ASSERT_TRUE(bucket.memory().BeginRound().ok());
  }
  EXPECT_EQ(gpus.group(0).Check().code(), absl::StatusCode::kDeadlineExceeded);
  gpus.ExpectNothingLeft();
}

}  // namespace
}  // namespace thalweg::several_gpus_test
