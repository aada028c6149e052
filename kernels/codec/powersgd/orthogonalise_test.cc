#include "kernels/codec/powersgd/orthogonalise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace thalweg::orthogonalise_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to float32

// Columns is a row-major matrix whose columns are the vectors.
struct Columns {
  size_t rows;
  size_t rank;
  std::vector<float> elements;

  std::vector<double> At(size_t k) const {
    std::vector<double> column;
    for (size_t i = 0; i < rows; ++i) column.push_back(elements[i * rank + k]);
    return column;
  }
  void Set(size_t k, const std::vector<double>& column) {
    for (size_t i = 0; i < rows; ++i) elements[i * rank + k] = static_cast<float>(column[i]);
  }
};

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double Norm(const std::vector<double>& a) { return std::sqrt(Dot(a, a)); }

Columns Random(size_t rows, size_t rank, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Columns result{rows, rank, std::vector<float>(rows * rank)};
  for (float& element : result.elements) element = normal(random);
  return result;
}

// Checks that column k of the result is a unit vector, orthogonal to the others up to float32's
// rounding of both, and the unit of what the previous ones leave of column k of `input`: the one QR
// decomposition whose diagonal is positive.
void ExpectOrthonormalBasis(const Columns& got, const Columns& input) {
  for (size_t k = 0; k < got.rank; ++k) {
    for (size_t other = 0; other <= k; ++other) {
      // Each product has two rounded elements; the sum of their magnitudes is at most 1.
      ASSERT_NEAR(Dot(got.At(k), got.At(other)), k == other ? 1.0 : 0.0, 2.01 * kUnit)
          << k << ", " << other;
    }
    for (size_t before = 0; before < k; ++before) {
      const std::vector<double> column = input.At(before);
      ASSERT_NEAR(Dot(got.At(k), column), 0, 1.01 * kUnit * Norm(column)) << k << ", " << before;
    }
    ASSERT_GT(Dot(got.At(k), input.At(k)), 0) << k;
  }
}

TEST(OrthogonaliseTest, GivesTheBasisOfTheColumnsInTheirOrder) {
  uint32_t seed = 1;
  for (size_t rows : {1, 2, 3, 7, 8, 9, 64, 100, 1023}) {
    for (size_t rank = 1; rank <= std::min<size_t>(rows, 9); ++rank) {
      SCOPED_TRACE(testing::Message() << rows << " x " << rank);
      const Columns input = Random(rows, rank, seed++);
      Columns got = input;
      EXPECT_THAT(OrthogonaliseColumns(got.elements, rank, 0), IsEmpty());
      ASSERT_NO_FATAL_FAILURE(ExpectOrthonormalBasis(got, input));
    }
  }
}

TEST(OrthogonaliseTest, ColumnsThatAreNearlyTheSameBecomeOrthonormal) {
  const size_t rows = 200;
  for (double difference : {1e-1, 1e-3, 1e-5}) {
    Columns input = Random(rows, 6, 2);
    const std::vector<double> first = input.At(0);
    for (size_t k = 1; k < 6; ++k) {
      std::vector<double> column = input.At(k);
      for (size_t i = 0; i < rows; ++i) column[i] = first[i] + difference * column[i];
      input.Set(k, column);
    }
    Columns got = input;
    EXPECT_THAT(OrthogonaliseColumns(got.elements, 6, 0), IsEmpty());
    ASSERT_NO_FATAL_FAILURE(ExpectOrthonormalBasis(got, input)) << difference;
  }
}

// One projection is not enough here: each column is almost the remainder of the column before, so
// the errors of one are multiplied by 2^20 in the next.
TEST(OrthogonaliseTest, ErrorsDoNotGrowFromColumnToColumn) {
  const size_t rows = 12;
  const auto walsh = [](size_t k, size_t i) { return std::popcount(k & i) % 2 == 0 ? 1.0 : -1.0; };
  Columns got{rows, 4, std::vector<float>(rows * 4)};
  for (size_t i = 0; i < rows; ++i) {
    got.elements[i * 4] = static_cast<float>(walsh(0, i));
    for (size_t k = 1; k < 4; ++k) {
      got.elements[i * 4 + k] = static_cast<float>(walsh(k - 1, i) + 0x1p-20 * walsh(k, i));
    }
  }
  EXPECT_THAT(OrthogonaliseColumns(got.elements, 4, 0), IsEmpty());
  for (size_t i = 0; i < rows; ++i) {
    for (size_t k = 0; k < 4; ++k) {
      // The bound is the errors of double, 2^-53, times 2^20 at most, and the rounding to float.
      EXPECT_NEAR(got.elements[i * 4 + k], walsh(k, i) / std::sqrt(12.0), 1.01 * kUnit) << k;
    }
  }
}

TEST(OrthogonaliseTest, MagnitudesAtBothEndsOfFloatWork) {
  for (float scale : {1e-38f, 1e37f}) {
    Columns input = Random(50, 3, 3);
    for (float& element : input.elements) element *= scale;
    Columns got = input;
    EXPECT_THAT(OrthogonaliseColumns(got.elements, 3, 0), IsEmpty());
    ASSERT_NO_FATAL_FAILURE(ExpectOrthonormalBasis(got, input)) << scale;
  }
}

TEST(OrthogonaliseTest, RowsGiveTheSameBitsAsColumns) {
  const size_t length = 77;
  const size_t rank = 5;
  Columns columns = Random(length, rank, 4);
  std::vector<float> rows;
  for (size_t k = 0; k < rank; ++k) {
    for (double element : columns.At(k)) rows.push_back(static_cast<float>(element));
  }
  EXPECT_THAT(OrthogonaliseColumns(columns.elements, rank, 1e-3), IsEmpty());
  EXPECT_THAT(OrthogonaliseRows(rows, rank, 1e-3), IsEmpty());
  for (size_t k = 0; k < rank; ++k) {
    for (size_t i = 0; i < length; ++i) {
      ASSERT_EQ(rows[k * length + i], columns.elements[i * rank + k]);
    }
  }
}

TEST(OrthogonaliseTest, DividesByTheNormAndEpsilon) {
  std::vector<float> rows = {3, 4, 1, 0};
  EXPECT_THAT(OrthogonaliseRows(rows, 2, 0), IsEmpty());
  EXPECT_THAT(rows, ElementsAre(0.6f, 0.8f, 0.8f, -0.6f));
  rows = {3, 4, 1, 0};
  EXPECT_THAT(OrthogonaliseRows(rows, 2, 5), IsEmpty());
  // The remainder of the second after the first has norm 0.8, for any length of the first.
  EXPECT_FLOAT_EQ(rows[0], 0.3f);
  EXPECT_FLOAT_EQ(rows[1], 0.4f);
  EXPECT_FLOAT_EQ(rows[2], 0.8f * 0.8f / 5.8f);
  EXPECT_FLOAT_EQ(rows[3], -0.6f * 0.8f / 5.8f);
}

TEST(OrthogonaliseTest, ColumnsWithoutADirectionOfTheirOwnBecomeZeroAndAreNamed) {
  const size_t rows = 100;
  for (double epsilon : {0.0, 1e-8}) {
    Columns got = Random(rows, 7, 5);
    got.Set(0, std::vector<double>(rows, 0.0));
    std::vector<double> multiple = got.At(1);
    for (double& element : multiple) element *= 1.0 / 3;
    got.Set(2, multiple);
    std::vector<double> sum = got.At(1);
    for (size_t i = 0; i < rows; ++i) sum[i] += 0.7 * got.At(3)[i];
    got.Set(4, sum);
    std::vector<double> nan = got.At(5);
    nan[17] = std::numeric_limits<double>::quiet_NaN();
    got.Set(5, nan);
    EXPECT_THAT(OrthogonaliseColumns(got.elements, 7, epsilon), ElementsAre(0, 2, 4, 5));
    for (size_t k : {0, 2, 4, 5}) EXPECT_THAT(got.At(k), Each(0.0)) << k;
    for (size_t k : {1, 3, 6}) EXPECT_NEAR(Norm(got.At(k)), 1, 1e-7 + epsilon) << k;
  }
}

TEST(OrthogonaliseTest, InfiniteColumnsBecomeZero) {
  std::vector<float> rows(16, std::numeric_limits<float>::infinity());
  EXPECT_THAT(OrthogonaliseRows(rows, 2, 0), ElementsAre(0, 1));
  EXPECT_THAT(rows, Each(0.0f));
}

TEST(OrthogonaliseTest, MoreColumnsThanElementsLeaveZeros) {
  Columns got = Random(2, 4, 6);
  EXPECT_THAT(OrthogonaliseColumns(got.elements, 4, 0), ElementsAre(2, 3));
}

TEST(SeedDirectionTest, GivesTheDocumentedSequence) {
  // The values were computed with arbitrary precision from the definition of splitmix64.
  std::vector<float> direction(5);
  SeedDirection({}, direction);
  EXPECT_THAT(direction, ElementsAre(-0x1.84c6a8p-2f, 0x1.ef7138p-2f, -0x1.1ece2cp-1f,
                                     0x1.2b132p-3f, -0x1.7e5364p-1f));
  SeedDirection({.seed = 7, .parameter = 0x123456789abcdef0, .column = 3, .use = 1}, direction);
  EXPECT_THAT(direction, ElementsAre(0x1.7618cp-2f, 0x1.d42a8cp-1f, 0x1.1b122p-4f, -0x1.289bfp-1f,
                                     -0x1.f9b7cp-2f));
}

TEST(SeedDirectionTest, IsUniformAndEveryMemberChangesIt) {
  const size_t length = 100'000;
  std::vector<float> direction(length);
  std::set<float> firsts;
  for (const DirectionSeed& seed :
       {DirectionSeed{}, {.seed = 1}, {.parameter = 1}, {.column = 1}, {.use = 1}}) {
    SeedDirection(seed, direction);
    firsts.insert(direction[0]);
    double mean = 0;
    double square = 0;
    for (double element : direction) {
      ASSERT_TRUE(element >= -1 && element < 1);
      mean += element / length;
      square += element * element / length;
    }
    // The bounds are five standard deviations of the means of `length` independent values: of
    // variance 1/3, and of squares of variance 4/45.
    EXPECT_NEAR(mean, 0, 5 * std::sqrt(1.0 / 3 / length));
    EXPECT_NEAR(square, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / length));
  }
  EXPECT_EQ(firsts.size(), 5u);
}

TEST(SeedDirectionTest, ReplacesAColumnThatBecameZero) {
  std::vector<float> rows = {1, 2, 3, 2, 4, 6, 0, 1, 0};
  EXPECT_THAT(OrthogonaliseRows(rows, 3, 0), ElementsAre(1));
  SeedDirection({.column = 1}, std::span(rows).subspan(3, 3));
  EXPECT_THAT(OrthogonaliseRows(rows, 3, 0), IsEmpty());
}

}  // namespace
}  // namespace thalweg::orthogonalise_test
