#include <algorithm>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/codec/powersgd/orthogonalise.h"
#include "kernels/codec/powersgd/powersgd_cuda_test_util.h"

namespace thalweg::orthogonalise_cuda_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Side says which factor is orthogonalised.
enum class Side { kP, kQ };

class OrthogonaliseOnDeviceTest : public DeviceTest, public ::testing::WithParamInterface<Side> {
 protected:
  bool IsP() const { return GetParam() == Side::kP; }

  // Returns a bucket of matrices whose orthogonalised vectors have these lengths.
  PowerSgdBucket BucketOf(const std::vector<FactorShape>& vectors, uint32_t seed) const {
    std::vector<FactorShape> shapes;
    for (const auto& [length, other, rank] : vectors) {
      shapes.push_back({IsP() ? length : other, IsP() ? other : length, rank});
    }
    return {shapes, 1, seed};
  }

  // Returns element i of vector k of matrix m.
  float& Element(PowerSgdBucket& bucket, const PlacedMatrix& m, size_t k, size_t i) const {
    return IsP() ? bucket.P(m)[i * m.shape.rank + k] : bucket.Q(m)[k * m.shape.cols + i];
  }

  // Returns how many elements were not finite.
  uint64_t ExpectTheCpusBits(PowerSgdBucket bucket, double epsilon) const {
    const BucketOnDevice device(bucket);
    std::vector<uint32_t> zeroed;
    for (const PlacedMatrix& m : bucket.matrices) {
      const std::vector<size_t> which =
          IsP() ? OrthogonaliseColumns(bucket.P(m), m.shape.rank, epsilon)
                : OrthogonaliseRows(bucket.Q(m), m.shape.rank, epsilon);
      for (size_t k = 0; k < m.shape.rank; ++k) {
        zeroed.push_back(std::ranges::count(which, k) > 0 ? 1 : 0);
      }
    }
    const DeviceBuffer& factors = IsP() ? device.p : device.q;
    ExpectDone((IsP() ? OrthogonaliseColumnsOnDevice : OrthogonaliseRowsOnDevice)(
        nullptr, device.plan, device.memory(), epsilon, factors.As<float>(), device.zeroed(),
        device.nonfinite.As<uint64_t>()));
    EXPECT_EQ(BitsOf(factors.ContentAs<float>()), BitsOf(IsP() ? bucket.p : bucket.q));
    EXPECT_EQ(device.ZeroedContent(), zeroed);
    return device.NonFinite();
  }
};
INSTANTIATE_TEST_SUITE_P(Factors, OrthogonaliseOnDeviceTest, ::testing::Values(Side::kP, Side::kQ),
                         [](const auto& info) {
                           return info.param == Side::kP ? "Columns" : "Rows";
                         });

TEST_P(OrthogonaliseOnDeviceTest, EqualsTheCpuForAnyLengthAndRank) {
  for (size_t rank : {1, 2, 3, 4, 8, 16}) {
    std::vector<FactorShape> vectors;
    // The lengths are around the block of threads and the tile of products, which are 256 and 2048
    // long.
    for (size_t length : {1, 7, 9, 257, 2048, 4500}) {
      if (rank <= 4 || length < 2048) vectors.push_back({length, 3, rank});
    }
    SCOPED_TRACE(testing::Message() << "rank " << rank);
    const double epsilon = rank % 2 == 0 ? 0 : 1e-3;
    EXPECT_EQ(ExpectTheCpusBits(BucketOf(vectors, static_cast<uint32_t>(rank)), epsilon), 0u);
  }
}

TEST_P(OrthogonaliseOnDeviceTest, ColumnsWithoutADirectionBecomeZeroAsOnTheCpu) {
  PowerSgdBucket bucket = BucketOf({{100, 9, 7}, {2, 9, 4}, {300, 9, 5}}, 5);
  const PlacedMatrix& m = bucket.matrices[0];
  for (size_t i = 0; i < 100; ++i) {
    Element(bucket, m, 0, i) = 0;
    Element(bucket, m, 2, i) = Element(bucket, m, 1, i) / 3;
    Element(bucket, m, 4, i) = Element(bucket, m, 1, i) + 0.7f * Element(bucket, m, 3, i);
    Element(bucket, m, 5, i) = Element(bucket, m, 3, i) + 1e-5f * Element(bucket, m, 5, i);
  }
  Element(bucket, m, 6, 17) = kNan;
  Element(bucket, bucket.matrices[2], 1, 299) = kInfinity;
  Element(bucket, bucket.matrices[2], 3, 0) = -kInfinity;
  EXPECT_EQ(ExpectTheCpusBits(bucket, 0), 3u);
}

TEST_P(OrthogonaliseOnDeviceTest, MagnitudesAtBothEndsOfFloatEqualTheCpu) {
  for (float scale : {1e-42f, 1e-38f, 1e37f}) {
    PowerSgdBucket bucket = BucketOf({{50, 8, 3}}, 3);
    for (size_t k = 0; k < 3; ++k) {
      for (size_t i = 0; i < 50; ++i) Element(bucket, bucket.matrices[0], k, i) *= scale;
    }
    EXPECT_EQ(ExpectTheCpusBits(bucket, 0), 0u) << scale;
  }
}

TEST_P(OrthogonaliseOnDeviceTest, RoundingsThatShowEqualTheCpu) {
  PowerSgdBucket bucket = BucketOf({{100, 9, 3}, {4500, 9, 3}}, 4);
  for (const PlacedMatrix& m : bucket.matrices) {
    const size_t length = IsP() ? m.shape.rows : m.shape.cols;
    Element(bucket, m, 0, 3) = Element(bucket, m, 0, length - 2) = 1;
    // These cancel in the product with the first column. What is left is 2^-40 of them, of which
    // doubles keep 13 bits: elements of that size reveal the order of the additions.
    Element(bucket, m, 1, 3) = 0x1p40f;
    Element(bucket, m, 1, length - 2) = -0x1p40f;
    // Little is left of this: one of 2^8 elements reveals how its double was rounded.
    for (size_t i = 0; i < length; ++i) {
      float& element = Element(bucket, m, 2, i);
      element = Element(bucket, m, 0, i) + 0x1p-20f * element;
    }
  }
  EXPECT_EQ(ExpectTheCpusBits(bucket, 0), 0u);
}

}  // namespace
}  // namespace thalweg::orthogonalise_cuda_test
