#include "kernels/codec/powersgd/powersgd.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast/element.h"
#include "kernels/cast/test_util.h"
#include "kernels/codec/powersgd/orthogonalise.h"

namespace thalweg::powersgd_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to float32

// Floats begin anywhere relative to a vector's size, and end where their allocation does.
class Floats {
 public:
  explicit Floats(size_t count, float value = 0) : storage_(kOffset + count, value) {}
  std::span<float> All() { return std::span(storage_).subspan(kOffset); }
  float& operator[](size_t i) { return storage_[kOffset + i]; }
  bool operator==(const Floats&) const = default;

 private:
  static constexpr size_t kOffset = 3;
  std::vector<float> storage_;
};

Floats Random(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Floats result(count);
  for (float& value : result.All()) value = normal(random);
  return result;
}

void ExpectSameBits(std::span<const float> got, std::span<const float> expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(BitCast<uint32_t>(got[i]), BitCast<uint32_t>(expected[i]))
        << "element " << i << ": expected " << expected[i] << ", got " << got[i];
  }
}

// A Case has everything that one matrix needs.
struct Case {
  Case(size_t rows, size_t cols, size_t wanted_rank, std::mt19937& random)
      : shape{rows, cols, FactorRank(rows, cols, wanted_rank)},
        gradient(Random(rows * cols, random)),
        error(Random(rows * cols, random)),
        p(Random(rows * shape.rank, random)),
        q(Random(shape.rank * cols, random)) {}

  FactorShape shape;
  Floats gradient;
  Floats error;
  Floats p;
  Floats q;
};

// Calls `check` with matrices of all sizes that the code distinguishes, on every target.
template <class Check>
void ForEachCase(Check check) {
  constexpr size_t kSizes[][2] = {{1, 1},    {1, 70},   {9, 1},   {2, 3},    {3, 17},
                                  {8, 8},    {13, 33},  {17, 64}, {33, 130}, {64, 147},
                                  {9, 2100}, {6, 1100}, {5, 4203}};
  std::mt19937 random(1);
  for (const auto& [rows, cols] : kSizes) {
    for (size_t rank = 1; rank <= std::min<size_t>({rows, cols, 9}); ++rank) {
      const Case made(rows, cols, rank, random);
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        SCOPED_TRACE(testing::Message() << rows << " x " << cols << ", rank " << rank << " on "
                                        << hwy::TargetName(target));
        const ForcedTarget forced(target);
        check(made);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(AddErrorAndProjectTest, StoresTheSumAndItsProductWithTheFactor) {
  ForEachCase([](Case c) {
    const auto [rows, cols, rank] = c.shape;
    Floats sum(rows * cols);
    for (size_t i = 0; i < rows * cols; ++i) sum[i] = c.gradient[i] + c.error[i];
    EXPECT_EQ(AddErrorAndProject(c.shape, c.gradient.All(), c.error.All(), c.error.All(), c.q.All(),
                                 c.p.All()),
              0u);
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.error.All(), sum.All()));
    for (size_t i = 0; i < rows; ++i) {
      for (size_t k = 0; k < rank; ++k) {
        double product = 0;
        double magnitude = 0;
        for (size_t j = 0; j < cols; ++j) {
          const double term = static_cast<double>(sum[i * cols + j]) * c.q[k * cols + j];
          product += term;
          magnitude += std::abs(term);
        }
        // A sum of m products in any order rounds each term at most m + 1 times.
        ASSERT_NEAR(c.p[i * rank + k], product, static_cast<double>(cols + 1) * kUnit * magnitude);
      }
    }
  });
}

TEST(AddErrorAndProjectTest, SumMayLieElsewhereAndTheErrorStays) {
  ForEachCase([](Case c) {
    Floats error = c.error;
    Floats x(c.shape.rows * c.shape.cols);
    Case in_place = c;
    AddErrorAndProject(c.shape, c.gradient.All(), c.error.All(), x.All(), c.q.All(), c.p.All());
    AddErrorAndProject(c.shape, c.gradient.All(), in_place.error.All(), in_place.error.All(),
                       c.q.All(), in_place.p.All());
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.error.All(), error.All()));
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(x.All(), in_place.error.All()));
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.p.All(), in_place.p.All()));
  });
}

TEST(AddErrorAndProjectTest, WithoutFeedbackProjectsTheGradient) {
  ForEachCase([](Case c) {
    Floats zero(c.shape.rows * c.shape.cols);
    Floats expected = c.p;
    AddErrorAndProject(c.shape, c.gradient.All(), zero.All(), zero.All(), c.q.All(),
                       expected.All());
    EXPECT_EQ(AddErrorAndProject(c.shape, c.gradient.All(), {}, {}, c.q.All(), c.p.All()), 0u);
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.p.All(), expected.All()));
  });
}

TEST(AddErrorAndProjectTest, DoesNotDependOnTheCutIntoRows) {
  ForEachCase([](Case c) {
    const auto [rows, cols, rank] = c.shape;
    Case whole = c;
    AddErrorAndProject(whole.shape, whole.gradient.All(), whole.error.All(), whole.error.All(),
                       whole.q.All(), whole.p.All());
    size_t count = 1;
    for (size_t row = 0; row < rows; row += count, count = 1 + count % 5) {
      count = std::min(count, rows - row);
      AddErrorAndProject({count, cols, rank}, c.gradient.All().subspan(row * cols, count * cols),
                         c.error.All().subspan(row * cols, count * cols),
                         c.error.All().subspan(row * cols, count * cols), c.q.All(),
                         c.p.All().subspan(row * rank, count * rank));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.p.All(), whole.p.All()));
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.error.All(), whole.error.All()));
  });
}

TEST(AddErrorAndProjectTest, NonFiniteElementsShowInTheirRowAndStayOutOfTheError) {
  std::mt19937 random(2);
  const size_t rows = 6;
  const size_t cols = 37;
  for (size_t rank : {1, 2, 3, 4, 6}) {
    const Case made(rows, cols, rank, random);
    for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
      const ForcedTarget forced(target);
      Case clean = made;
      AddErrorAndProject(clean.shape, clean.gradient.All(), clean.error.All(), clean.error.All(),
                         clean.q.All(), clean.p.All());
      for (size_t at = 0; at < rows * cols; ++at) {
        Case c = made;
        c.gradient[at] = at % 3 == 0 ? kNan : at % 3 == 1 ? kInfinity : -kInfinity;
        c.q[at % cols] = 0;
        EXPECT_EQ(AddErrorAndProject(c.shape, c.gradient.All(), c.error.All(), c.error.All(),
                                     c.q.All(), c.p.All()),
                  1u);
        Case expected = clean;
        expected.error[at] = Case(made).error[at];
        ASSERT_NO_FATAL_FAILURE(ExpectSameBits(c.error.All(), expected.error.All()));
        for (size_t i = 0; i < rows; ++i) {
          ASSERT_EQ(std::isfinite(c.p[i * rank]), i != at / cols) << "element " << at;
        }
      }
    }
  }
}

TEST(AddErrorAndProjectTest, AnOverflowingSumIsStoredFiniteAndShowsInTheFactor) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    Floats gradient(19, -3e38f);
    Floats error(19, -1e38f);
    Floats q(19, 1.0f);
    Floats p(1);
    EXPECT_EQ(
        AddErrorAndProject({1, 19, 1}, gradient.All(), error.All(), error.All(), q.All(), p.All()),
        0u);
    EXPECT_FALSE(std::isfinite(p[0]));
    EXPECT_THAT(error.All(), testing::Each(-kLargest));
  }
}

TEST(RestoreErrorTest, UndoesTheAdditionUpToItsRounding) {
  ForEachCase([](Case c) {
    Case before = c;
    c.gradient[0] = kNan;
    AddErrorAndProject(c.shape, c.gradient.All(), c.error.All(), c.error.All(), c.q.All(),
                       c.p.All());
    Case added = c;
    RestoreError(c.gradient.All(), c.error.All());
    EXPECT_EQ(c.error[0], before.error[0]);
    for (size_t i = 1; i < c.shape.rows * c.shape.cols; ++i) {
      // The sum and the difference are rounded once each.
      const double tolerance =
          kUnit * (std::abs(static_cast<double>(added.error[i])) + std::abs(c.error[i]));
      ASSERT_NEAR(c.error[i], before.error[i], 1.0001 * tolerance) << i;
    }
  });
}

TEST(ProjectTransposedTest, EqualsItsDefinitionOnEveryTarget) {
  ForEachCase([](Case c) {
    const auto [rows, cols, rank] = c.shape;
    ProjectTransposed(c.shape, c.gradient.All(), c.p.All(), 0, cols, c.q.All());
    for (size_t k = 0; k < rank; ++k) {
      for (size_t j = 0; j < cols; ++j) {
        double product = 0;
        double magnitude = 0;
        float total = 0;
        for (size_t first = 0; first < rows; first += 8) {
          float sum = 0;
          for (size_t i = first; i < std::min(rows, first + 8); ++i) {
            sum = std::fma(c.p[i * rank + k], c.gradient[i * cols + j], sum);
            const double term = static_cast<double>(c.p[i * rank + k]) * c.gradient[i * cols + j];
            product += term;
            magnitude += std::abs(term);
          }
          total = first == 0 ? sum : total + sum;
        }
        ASSERT_EQ(c.q[k * cols + j], total) << k << ", " << j;
        // There are at most 8 roundings inside a block of rows and one for each block.
        const auto roundings = static_cast<double>(8 + rows / 8 + 1);
        ASSERT_NEAR(total, product, roundings * kUnit * magnitude);
      }
    }
  });
}

TEST(ProjectTransposedTest, BlocksOfColumnsGiveTheSameBitsAndWriteNothingElse) {
  ForEachCase([](Case c) {
    const size_t cols = c.shape.cols;
    Case whole = c;
    ProjectTransposed(whole.shape, whole.gradient.All(), whole.p.All(), 0, cols, whole.q.All());
    for (size_t width : {64, 320, 7}) {
      Case cut = c;
      std::ranges::fill(cut.q.All(), kNan);
      for (size_t j = 0; j < cols; j += width) {
        ProjectTransposed(cut.shape, cut.gradient.All(), cut.p.All(), j, std::min(cols, j + width),
                          cut.q.All());
        const size_t written = std::min(cols, j + width);
        ASSERT_TRUE(written == cols || std::isnan(cut.q[written]));
      }
      ASSERT_NO_FATAL_FAILURE(ExpectSameBits(cut.q.All(), whole.q.All()));
    }
  });
}

TEST(ReconstructTest, EqualsItsDefinitionOnEveryTarget) {
  ForEachCase([](Case c) {
    const auto [rows, cols, rank] = c.shape;
    Floats out(rows * cols);
    Floats left = c.error;
    EXPECT_EQ(Reconstruct(c.shape, c.p.All(), c.q.All(), left.All(), out.All()), 0u);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < cols; ++j) {
        float sum = c.p[i * rank] * c.q[j];
        double product = static_cast<double>(c.p[i * rank]) * c.q[j];
        double magnitude = std::abs(product);
        for (size_t k = 1; k < rank; ++k) {
          sum = std::fma(c.p[i * rank + k], c.q[k * cols + j], sum);
          const double term = static_cast<double>(c.p[i * rank + k]) * c.q[k * cols + j];
          product += term;
          magnitude += std::abs(term);
        }
        const size_t at = i * cols + j;
        ASSERT_EQ(out[at], sum) << i << ", " << j;
        ASSERT_NEAR(sum, product, static_cast<double>(rank) * kUnit * magnitude);
        ASSERT_EQ(left[at], c.error[at] - sum) << i << ", " << j;
      }
    }
  });
}

TEST(ReconstructTest, RowsMayBeCutAnywhereAndTheErrorLeftOut) {
  ForEachCase([](Case c) {
    const auto [rows, cols, rank] = c.shape;
    Floats whole(rows * cols);
    Reconstruct(c.shape, c.p.All(), c.q.All(), c.error.All(), whole.All());
    Floats out(rows * cols);
    size_t count = 1;
    for (size_t row = 0; row < rows; row += count, count = 1 + count % 4) {
      count = std::min(count, rows - row);
      Reconstruct({count, cols, rank}, c.p.All().subspan(row * rank, count * rank), c.q.All(), {},
                  out.All().subspan(row * cols, count * cols));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(out.All(), whole.All()));
  });
}

TEST(ReconstructTest, NonFiniteResultsAreCountedAndLeaveTheErrorFinite) {
  std::mt19937 random(3);
  const Case made(5, 37, 2, random);
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const ForcedTarget forced(target);
    for (size_t j = 0; j < 37; ++j) {
      Case c = made;
      c.q[j] = kInfinity;  // column j of every row: ±∞, but NaN where P is zero
      c.p[2 * 2] = 0;
      Floats out(5 * 37);
      EXPECT_EQ(Reconstruct(c.shape, c.p.All(), c.q.All(), c.error.All(), out.All()), 5u);
      for (size_t i = 0; i < 5; ++i) {
        EXPECT_FALSE(std::isfinite(out[i * 37 + j]));
        EXPECT_EQ(c.error[i * 37 + j], Case(made).error[i * 37 + j]);
      }
      EXPECT_EQ(BitCast<uint32_t>(out[2 * 37 + j]), Fp32::kNan);
      EXPECT_TRUE(std::ranges::all_of(c.error.All(), [](float e) { return std::isfinite(e); }));
    }
  }
}

double SquaredNorm(std::span<const float> values) {
  double sum = 0;
  for (double value : values) sum += value * value;
  return sum;
}

// Runs one node's round.
void CompressOnce(Case& c, Floats& out) {
  OrthogonaliseRows(c.q.All(), c.shape.rank, 0);
  AddErrorAndProject(c.shape, c.gradient.All(), c.error.All(), c.error.All(), c.q.All(), c.p.All());
  OrthogonaliseColumns(c.p.All(), c.shape.rank, 0);
  ProjectTransposed(c.shape, c.error.All(), c.p.All(), 0, c.shape.cols, c.q.All());
  Reconstruct(c.shape, c.p.All(), c.q.All(), c.error.All(), out.All());
}

TEST(PowerSgdTest, WhatIsDecodedOverTimeIsWhatWasPutIn) {
  std::mt19937 random(4);
  for (size_t rank : {1, 2, 4, 8}) {
    Case c(18, 24, rank, random);
    std::ranges::fill(c.error.All(), 0.0f);
    const size_t elems = c.gradient.All().size();
    std::vector<double> sent(elems);
    std::vector<double> rounding(elems);
    Floats out(elems);
    const int rounds = 100;
    for (int round = 0; round < rounds; ++round) {
      CompressOnce(c, out);
      for (size_t i = 0; i < elems; ++i) {
        sent[i] += out[i];
        // X = G + E and E = X − G' are rounded once each; X is E + G'.
        const double error = std::abs(static_cast<double>(c.error[i]));
        rounding[i] += kUnit * (2 * error + std::abs(static_cast<double>(out[i])));
      }
    }
    for (size_t i = 0; i < elems; ++i) {
      const double put_in = rounds * static_cast<double>(c.gradient[i]);
      ASSERT_NEAR(sent[i] + c.error[i], put_in, 1.0001 * rounding[i]) << "rank " << rank;
    }
    // A round that removes at least the fraction δ = k / min(n, m) of ‖X‖², as even an average
    // direction does, keeps ‖E‖ below 2 / δ · ‖G‖ forever: a vanishing part of what was put in.
    const double bound = 2.0 * 18 / static_cast<double>(rank);
    EXPECT_LT(std::sqrt(SquaredNorm(c.error.All()) / SquaredNorm(c.gradient.All())), bound);
  }
}

TEST(PowerSgdTest, AMatrixOfTheFactorsRankIsSentWhole) {
  std::mt19937 random(5);
  Case c(30, 41, 3, random);
  std::ranges::fill(c.error.All(), 0.0f);
  const Floats p = Random(30 * 3, random);
  const Floats q = Random(3 * 41, random);
  Reconstruct(c.shape, Floats(p).All(), Floats(q).All(), {}, c.gradient.All());
  c.q = q;
  Floats out(30 * 41);
  CompressOnce(c, out);
  // The three products have relative errors below m + 1, n + 1 and k roundings. That of P turns its
  // span by as much, times its condition: below 4 for these, whose columns are nearly orthogonal.
  const double tolerance = 4 * (42 + 31 + 3) * kUnit;
  EXPECT_LT(std::sqrt(SquaredNorm(c.error.All()) / SquaredNorm(c.gradient.All())), tolerance);
}

TEST(PowerSgdTest, OnlyMatricesWhoseFactorsAreSmallerAreCompressed) {
  EXPECT_EQ(FactorRank(64, 147, 4), 4u);
  EXPECT_EQ(FactorRank(2, 147, 4), 2u);
  EXPECT_EQ(FactorRank(64, 3, 4), 3u);
  EXPECT_TRUE(Compresses(64, 64, 4, 2));
  EXPECT_FALSE(Compresses(16, 16, 4, 2)) << "as large as half of the matrix is not smaller";
  EXPECT_TRUE(Compresses(16, 17, 4, 2));
  EXPECT_FALSE(Compresses(64, 64, 4, 8));
  EXPECT_FALSE(Compresses(1000, 1, 4, 0.1)) << "a vector";
  EXPECT_FALSE(Compresses(1, 1000, 4, 0.1)) << "a vector";
  EXPECT_FALSE(Compresses(0, 1000, 4, 2));
}

}  // namespace
}  // namespace thalweg::powersgd_test
