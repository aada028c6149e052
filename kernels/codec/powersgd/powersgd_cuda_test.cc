#include "kernels/codec/powersgd/powersgd_cuda.h"

#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd_cuda_test_util.h"
#include "kernels/launch/count_launches.h"

namespace thalweg::powersgd_cuda_test {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to float32

// Returns one shape of each kind: single elements, odd sides, rows shared by few lanes, a warp or a
// block; with rank 4 also more rows than a tile or a strip takes at once.
std::vector<FactorShape> Shapes(size_t rank) {
  constexpr size_t kSizes[][2] = {{1, 1},    {1, 70},   {9, 1},    {2, 3},    {3, 17},
                                  {8, 8},    {13, 33},  {17, 64},  {20, 147}, {5, 1100},
                                  {6, 1501}, {20, 130}, {300, 40}, {800, 20}, {64, 256}};
  constexpr size_t kSmall = 11;
  std::vector<FactorShape> shapes;
  for (const auto& [rows, cols] : std::span(kSizes).first(rank == 4 ? std::size(kSizes) : kSmall)) {
    shapes.push_back({rows, cols, FactorRank(rows, cols, rank)});
  }
  return shapes;
}

// A Lie gives the positions of a bucket and its matrices relative to multiples of 16 bytes.
struct Lie {
  size_t alignment;
  size_t shift;
};

// Calls check(bucket, shift) for all ranks and alignments.
template <class Check>
void ForEachBucket(const Check& check) {
  for (size_t rank : {1, 2, 3, 4, 8, 16}) {
    for (const auto& [alignment, shift] : {Lie{4, 0}, Lie{1, 1}}) {
      SCOPED_TRACE(testing::Message()
                   << "rank " << rank << ", alignment " << alignment << ", shift " << shift);
      check(PowerSgdBucket(Shapes(rank), alignment, static_cast<uint32_t>(rank)), shift);
    }
  }
}

// The following functions run on the CPU, matrix by matrix.

uint64_t AddErrorAndProject(PowerSgdBucket& b) {
  uint64_t nonfinite = 0;
  for (const PlacedMatrix& m : b.matrices) {
    nonfinite += AddErrorAndProject(m.shape, b.Of(m, b.gradient), b.Of(m, b.error),
                                    b.Of(m, b.error), b.Q(m), b.P(m));
  }
  return nonfinite;
}

void ProjectTransposed(PowerSgdBucket& b) {
  for (const PlacedMatrix& m : b.matrices) {
    ProjectTransposed(m.shape, b.Of(m, b.error.empty() ? b.gradient : b.error), b.P(m), 0,
                      m.shape.cols, b.Q(m));
  }
}

uint64_t Reconstruct(PowerSgdBucket& b) {
  uint64_t nonfinite = 0;
  for (const PlacedMatrix& m : b.matrices) {
    nonfinite += Reconstruct(m.shape, b.P(m), b.Q(m), b.Of(m, b.error), b.Of(m, b.gradient));
  }
  return nonfinite;
}

absl::Status AddErrorAndProject(const BucketOnDevice& d, CudaStream stream = nullptr) {
  return AddErrorAndProjectOnDevice(stream, d.plan, d.memory(), d.gradient.As<float>(), d.error(),
                                    d.q.As<float>(), d.p.As<float>(), d.nonfinite.As<uint64_t>());
}

absl::Status ProjectTransposed(const BucketOnDevice& d, CudaStream stream = nullptr) {
  return ProjectTransposedOnDevice(stream, d.plan, d.memory(),
                                   d.error() == nullptr ? d.gradient.As<float>() : d.error(),
                                   d.p.As<float>(), d.q.As<float>());
}

absl::Status Reconstruct(const BucketOnDevice& d, CudaStream stream = nullptr) {
  return ReconstructOnDevice(stream, d.plan, d.memory(), d.p.As<float>(), d.q.As<float>(),
                             d.error(), d.gradient.As<float>(), d.nonfinite.As<uint64_t>());
}

using PowerSgdOnDeviceTest = DeviceTest;

// Checks P; `x` is what was projected.
void ExpectProducts(PowerSgdBucket& b, Floats& x, const Floats& got) {
  for (const PlacedMatrix& m : b.matrices) {
    const auto [rows, cols, rank] = m.shape;
    for (size_t i = 0; i < rows; ++i) {
      for (size_t k = 0; k < rank; ++k) {
        double product = 0;
        double magnitude = 0;
        for (size_t j = 0; j < cols; ++j) {
          const double term = static_cast<double>(b.Of(m, x)[i * cols + j]) * b.Q(m)[k * cols + j];
          product += term;
          magnitude += std::abs(term);
        }
        // A sum of m products in any order rounds each term at most m + 1 times.
        ASSERT_NEAR(got[m.p_offset + i * rank + k], product,
                    static_cast<double>(cols + 1) * kUnit * magnitude)
            << rows << " x " << cols << ", row " << i << ", column " << k;
      }
    }
  }
}

TEST_F(PowerSgdOnDeviceTest, Pass1StoresTheCpusSumAndItsProductWithTheFactor) {
  ForEachBucket([](PowerSgdBucket bucket, size_t shift) {
    for (bool feedback : {true, false}) {
      if (!feedback) bucket.error.clear();
      const BucketOnDevice device(bucket, shift);
      ASSERT_NO_FATAL_FAILURE(ExpectDone(AddErrorAndProject(device)));
      const Floats p = device.p.ContentAs<float>();
      Floats before = bucket.p;
      AddErrorAndProject(bucket);
      EXPECT_EQ(BitsOf(device.ErrorContent()), BitsOf(bucket.error));
      EXPECT_EQ(BitsOf(device.gradient.ContentAs<float>()), BitsOf(bucket.gradient));
      EXPECT_EQ(device.NonFinite(), 0u);
      ASSERT_NO_FATAL_FAILURE(ExpectProducts(bucket, feedback ? bucket.error : bucket.gradient, p));
      for (const PlacedMatrix& m : bucket.matrices) {
        EXPECT_EQ(p[m.p_offset - 1], before[m.p_offset - 1]) << "between matrices";
      }
    }
  });
}

TEST_F(PowerSgdOnDeviceTest, TheSameCallGivesTheSameBits) {
  for (const auto& [alignment, shift] : {Lie{4, 0}, Lie{1, 1}}) {
    const PowerSgdBucket bucket(Shapes(3), alignment, 11);
    const BucketOnDevice first(bucket, shift);
    ASSERT_NO_FATAL_FAILURE(ExpectDone(AddErrorAndProject(first)));
    for (int again = 0; again < 2; ++again) {
      const BucketOnDevice device(bucket, shift);
      ASSERT_NO_FATAL_FAILURE(ExpectDone(AddErrorAndProject(device)));
      EXPECT_EQ(BitsOf(device.p.ContentAs<float>()), BitsOf(first.p.ContentAs<float>()));
    }
  }
}

TEST_F(PowerSgdOnDeviceTest, NonFiniteElementsShowInTheirRowAndStayOutOfTheError) {
  for (size_t rank : {1, 2, 3, 4, 6, 8}) {
    const FactorShape shapes[] = {{8, 40, rank}, {6, 37, rank}, {7, 1100, rank}};
    PowerSgdBucket bucket(shapes, 4, 2);
    uint32_t count = 0;
    for (const PlacedMatrix& m : bucket.matrices) {
      const auto [rows, cols, unused] = m.shape;
      for (size_t i = 0; i < rows; i += 2) {
        const size_t j = (i * 7 + 3) % cols;
        bucket.Of(m, bucket.gradient)[i * cols + j] = i % 3 == 0   ? kNan
                                                      : i % 3 == 1 ? kInfinity
                                                                   : -kInfinity;
        bucket.Q(m)[j] = 0;
        ++count;
      }
      // An overflowing sum is stored as a finite number.
      bucket.Of(m, bucket.gradient)[cols + 5] = -3e38f;
      bucket.Of(m, bucket.error)[cols + 5] = -1e38f;
      bucket.Q(m)[5] = 1;
    }
    const BucketOnDevice device(bucket);
    ASSERT_NO_FATAL_FAILURE(ExpectDone(AddErrorAndProject(device)));
    EXPECT_EQ(AddErrorAndProject(bucket), count);
    EXPECT_EQ(device.NonFinite(), count);
    EXPECT_EQ(BitsOf(device.ErrorContent()), BitsOf(bucket.error));
    const Floats p = device.p.ContentAs<float>();
    for (const PlacedMatrix& m : bucket.matrices) {
      for (size_t i = 0; i < m.shape.rows; ++i) {
        EXPECT_EQ(std::isfinite(p[m.p_offset + i * rank]), i % 2 != 0 && i != 1) << "row " << i;
      }
    }
  }
}

TEST_F(PowerSgdOnDeviceTest, RestoringGivesTheCpusError) {
  for (const auto& [alignment, shift] : {Lie{4, 0}, Lie{1, 0}}) {
    PowerSgdBucket bucket(Shapes(2), alignment, 3);
    for (const PlacedMatrix& m : bucket.matrices) bucket.Of(m, bucket.gradient)[0] = kNan;
    AddErrorAndProject(bucket);
    const BucketOnDevice device(bucket, shift);
    ASSERT_NO_FATAL_FAILURE(ExpectDone(RestoreErrorOnDevice(
        nullptr, device.plan, device.memory(), device.gradient.As<float>(), device.error())));
    for (const PlacedMatrix& m : bucket.matrices) {
      RestoreError(bucket.Of(m, bucket.gradient), bucket.Of(m, bucket.error));
    }
    EXPECT_EQ(BitsOf(device.ErrorContent()), BitsOf(bucket.error));
  }
}

TEST_F(PowerSgdOnDeviceTest, Pass2GivesTheCpusBits) {
  ForEachBucket([](PowerSgdBucket bucket, size_t shift) {
    const BucketOnDevice device(bucket, shift);
    ASSERT_NO_FATAL_FAILURE(ExpectDone(ProjectTransposed(device)));
    ProjectTransposed(bucket);
    EXPECT_EQ(BitsOf(device.q.ContentAs<float>()), BitsOf(bucket.q));
  });
}

TEST_F(PowerSgdOnDeviceTest, Pass3GivesTheCpusBits) {
  ForEachBucket([](PowerSgdBucket bucket, size_t shift) {
    for (bool feedback : {true, false}) {
      if (!feedback) bucket.error.clear();
      const BucketOnDevice device(bucket, shift);
      ASSERT_NO_FATAL_FAILURE(ExpectDone(Reconstruct(device)));
      EXPECT_EQ(Reconstruct(bucket), 0u);
      EXPECT_EQ(device.NonFinite(), 0u);
      EXPECT_EQ(BitsOf(device.gradient.ContentAs<float>()), BitsOf(bucket.gradient));
      EXPECT_EQ(BitsOf(device.ErrorContent()), BitsOf(bucket.error));
    }
  });
}

TEST_F(PowerSgdOnDeviceTest, NonFiniteResultsAreTheCpusAndLeaveTheErrorFinite) {
  for (size_t rank : {2, 3}) {
    const FactorShape shapes[] = {{5, 37, rank}, {9, 64, rank}};
    PowerSgdBucket bucket(shapes, 4, 4);
    for (const PlacedMatrix& m : bucket.matrices) {
      bucket.Q(m)[7] = kInfinity;
      bucket.Q(m)[m.shape.cols + 20] = kNan;
      bucket.P(m)[2 * rank] = 0;
      bucket.P(m)[4 * rank] = 3e38f;
      bucket.Q(m)[9] = 3e38f;
    }
    const BucketOnDevice device(bucket);
    ASSERT_NO_FATAL_FAILURE(ExpectDone(Reconstruct(device)));
    const uint64_t nonfinite = Reconstruct(bucket);
    EXPECT_GE(nonfinite, 2u * (5 + 9));
    EXPECT_EQ(device.NonFinite(), nonfinite);
    EXPECT_EQ(BitsOf(device.gradient.ContentAs<float>()), BitsOf(bucket.gradient));
    EXPECT_EQ(BitsOf(device.ErrorContent()), BitsOf(bucket.error));
  }
}

TEST_F(PowerSgdOnDeviceTest, ANodeWithAGpuAndOneWithoutGetTheSameBitsFromOneRound) {
  PowerSgdBucket cpu(Shapes(2), 4, 7);
  PowerSgdBucket other(Shapes(2), 4, 8);
  other.q = cpu.q;
  BucketOnDevice gpu(other);
  const auto average = [](Floats& host, DeviceBuffer& device) {
    Floats mean = device.ContentAs<float>();
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = 0.5f * (mean[i] + host[i]);
    host = mean;
    device.Fill(DeviceBuffer(mean).Content());
  };
  for (const PlacedMatrix& m : cpu.matrices) OrthogonaliseRows(cpu.Q(m), m.shape.rank, 0);
  AddErrorAndProject(cpu);
  ExpectDone(OrthogonaliseRowsOnDevice(nullptr, gpu.plan, gpu.memory(), 0, gpu.q.As<float>(),
                                       gpu.zeroed(), gpu.nonfinite.As<uint64_t>()));
  ExpectDone(AddErrorAndProject(gpu));
  EXPECT_EQ(BitsOf(gpu.q.ContentAs<float>()), BitsOf(cpu.q));
  average(cpu.p, gpu.p);
  for (const PlacedMatrix& m : cpu.matrices) OrthogonaliseColumns(cpu.P(m), m.shape.rank, 0);
  ProjectTransposed(cpu);
  ExpectDone(OrthogonaliseColumnsOnDevice(nullptr, gpu.plan, gpu.memory(), 0, gpu.p.As<float>(),
                                          gpu.zeroed(), gpu.nonfinite.As<uint64_t>()));
  ExpectDone(ProjectTransposed(gpu));
  average(cpu.q, gpu.q);
  Reconstruct(cpu);
  ExpectDone(Reconstruct(gpu));
  const Floats result = gpu.gradient.ContentAs<float>();
  for (const PlacedMatrix& m : cpu.matrices) {
    for (size_t i = m.offset; i < m.offset + m.shape.rows * m.shape.cols; ++i) {
      ASSERT_EQ(BitCast<uint32_t>(result[i]), BitCast<uint32_t>(cpu.gradient[i])) << i;
    }
  }
}

TEST_F(PowerSgdOnDeviceTest, ABucketWithoutMatricesNeedsNothing) {
  const BucketOnDevice device(PowerSgdBucket({}, 1, 1));
  EXPECT_EQ(device.plan.workspace_bytes(), 0u);
  ASSERT_NO_FATAL_FAILURE(ExpectDone(AddErrorAndProject(device)));
  ASSERT_NO_FATAL_FAILURE(ExpectDone(ProjectTransposed(device)));
  ASSERT_NO_FATAL_FAILURE(ExpectDone(Reconstruct(device)));
}

TEST_F(PowerSgdOnDeviceTest, ARoundTakesFiveLaunchesForAnyNumberOfMatrices) {
  for (size_t rank : {1, 16}) {
    const BucketOnDevice d(PowerSgdBucket(Shapes(rank), 1, 9));
    const auto orthogonalise = [&](auto on_device, const DeviceBuffer& factors, CudaStream stream) {
      return on_device(stream, d.plan, d.memory(), 0, factors.As<float>(), d.zeroed(),
                       d.nonfinite.As<uint64_t>());
    };
    const absl::StatusOr<uint64_t> launches = CountLaunches([&](CudaStream stream) -> absl::Status {
      THALWEG_RETURN_IF_ERROR(orthogonalise(OrthogonaliseRowsOnDevice, d.q, stream));
      THALWEG_RETURN_IF_ERROR(AddErrorAndProject(d, stream));
      THALWEG_RETURN_IF_ERROR(orthogonalise(OrthogonaliseColumnsOnDevice, d.p, stream));
      THALWEG_RETURN_IF_ERROR(ProjectTransposed(d, stream));
      return Reconstruct(d, stream);
    });
    ASSERT_TRUE(launches.ok()) << launches.status();
    EXPECT_EQ(*launches, 5u);
  }
}

TEST(PowerSgdPlanTest, MatricesThatCannotBeAreRefusedByNumber) {
  for (const FactorShape& shape : {FactorShape{0, 3, 1}, FactorShape{3, 0, 1}, FactorShape{3, 3, 0},
                                   FactorShape{3, 3, 257}, FactorShape{size_t{1} << 31, 3, 1}}) {
    const PlacedMatrix matrices[] = {{{2, 2, 1}}, {shape}};
    const absl::Status status = PowerSgdPlan::Make(matrices).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("matrix 1: expected"));
  }
}

TEST(PowerSgdPlanTest, ATableThatIsNotAlignedIsRefused) {
  const PowerSgdPlan plan = PowerSgdPlan::Make({}).value();
  alignas(16) std::byte bytes[16];
  const absl::Status status =
      RestoreErrorOnDevice(nullptr, plan, {bytes + 4, nullptr}, nullptr, nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("got one 4 bytes behind"));
}

}  // namespace
}  // namespace thalweg::powersgd_cuda_test
