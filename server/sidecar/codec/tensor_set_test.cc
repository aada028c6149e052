#include "server/sidecar/codec/tensor_set.h"

#include <gtest/gtest.h>

#include <tuple>

namespace thalweg::tensor_set_test {
namespace {

using Parts = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, size_t>>;

Parts AsTuples(const std::vector<TensorSet::Piece>& pieces) {
  Parts parts;
  for (const auto& p : pieces) parts.emplace_back(p.begin, p.offset, p.elems, p.tensor);
  return parts;
}

// Elements 0-2, 3-6, none, 7-11, 12.
const BucketLayout kBucket{DType::kFloat16,
                           {{"a", {3}}, {"b", {2, 2}}, {"none", {0, 4}}, {"c", {5}}, {"d", {}}}};

TEST(TensorSetTest, IsABucketOfItsOwn) {
  const TensorSet set(kBucket, {0, 3});
  EXPECT_EQ(set.layout(), (BucketLayout{DType::kFloat16, {{"a", {3}}, {"c", {5}}}}));
  EXPECT_EQ(set.Elems(), 8u);
  EXPECT_EQ(set.Bytes(), 16u);
  EXPECT_EQ(set.BucketOffset(1), 7u);
}

TEST(TensorSetTest, PiecesAreCutWhereTheBucketHasOtherTensorsBetween) {
  const TensorSet set(kBucket, {0, 3, 4});
  EXPECT_EQ(AsTuples(set.BucketPieces(0, 9)), (Parts{{0, 0, 3, 0}, {3, 7, 6, 0}}));
  EXPECT_EQ(AsTuples(set.BucketPieces(1, 4)), (Parts{{1, 1, 2, 0}, {3, 7, 1, 0}}));
  EXPECT_EQ(AsTuples(set.BucketPieces(4, 9)), (Parts{{4, 8, 5, 0}}));
}

TEST(TensorSetTest, WholeBucketIsOnePiece) {
  const TensorSet set(kBucket, {0, 1, 2, 3, 4});
  EXPECT_EQ(AsTuples(set.BucketPieces(0, 13)), (Parts{{0, 0, 13, 0}}));
  EXPECT_EQ(AsTuples(set.BucketPieces(5, 8)), (Parts{{5, 5, 3, 0}}));
}

TEST(TensorSetTest, TensorPiecesNameTheTensorAndSkipEmptyOnes) {
  const TensorSet set(kBucket, {1, 2, 3, 4});
  EXPECT_EQ(AsTuples(set.TensorPieces(0, 10)), (Parts{{0, 0, 4, 0}, {4, 0, 5, 2}, {9, 0, 1, 3}}));
  EXPECT_EQ(AsTuples(set.TensorPieces(2, 6)), (Parts{{2, 2, 2, 0}, {4, 0, 2, 2}}));
}

TensorSet Aligned(const std::vector<uint32_t>& members, uint64_t elems) {
  return TensorSet(kBucket, members).AlignedTo(elems);
}

TEST(TensorSetTest, AlignedTensorsBeginAtMultiplesAndTheLastIsNotPadded) {
  const TensorSet set = Aligned({0, 1, 3, 4}, 4);
  EXPECT_EQ(AsTuples(set.TensorPieces(0, set.Elems())),
            (Parts{{0, 0, 3, 0}, {4, 0, 4, 1}, {8, 0, 5, 2}, {16, 0, 1, 3}}));
  EXPECT_EQ(set.Elems(), 17u);
  EXPECT_EQ(set.PaddedTensors(),
            (std::vector<TensorSpec>{
                {"a", {3}}, {"", {1}}, {"b", {2, 2}}, {"c", {5}}, {"", {3}}, {"d", {}}}));
}

TEST(TensorSetTest, PaddingIsNoPartOfTheTensorsOfAnAlignedSet) {
  const TensorSet set = Aligned({0, 3}, 4);
  EXPECT_EQ(set.layout(), TensorSet(kBucket, {0, 3}).layout());
  EXPECT_EQ(set.Bytes(), 16u);
  EXPECT_EQ(set.BucketOffset(1), 7u);
}

TEST(TensorSetTest, PiecesOfTheBucketAreCutAtPadding) {
  const TensorSet set = Aligned({0, 1, 3, 4}, 4);
  EXPECT_EQ(AsTuples(set.BucketPieces(0, 17)), (Parts{{0, 0, 3, 0}, {4, 3, 9, 0}, {16, 12, 1, 0}}));
  EXPECT_EQ(AsTuples(set.BucketPieces(1, 4)), (Parts{{1, 1, 2, 0}}));
  EXPECT_EQ(AsTuples(set.BucketPieces(14, 17)), (Parts{{16, 12, 1, 0}}));
  EXPECT_TRUE(set.BucketPieces(13, 16).empty());
}

TEST(TensorSetTest, AligningChangesNothingWhereTensorsHaveThatManyElements) {
  const BucketLayout bucket{DType::kFloat32, {{"a", {8}}, {"b", {2, 2}}, {"c", {3}}}};
  const TensorSet set = TensorSet(bucket, {0, 1, 2}).AlignedTo(4);
  EXPECT_EQ(set.PaddedTensors(), bucket.tensors);
  EXPECT_EQ(AsTuples(set.BucketPieces(0, 15)), (Parts{{0, 0, 15, 0}}));
}

TEST(TensorSetTest, EveryRangeIsCoveredInOrder) {
  const TensorSet set(kBucket, {0, 3, 4});
  for (uint64_t begin = 0; begin < set.Elems(); ++begin) {
    for (uint64_t end = begin + 1; end <= set.Elems(); ++end) {
      for (const auto& pieces : {set.BucketPieces(begin, end), set.TensorPieces(begin, end)}) {
        uint64_t next = begin;
        for (const auto& piece : pieces) {
          EXPECT_EQ(piece.begin, next);
          next += piece.elems;
        }
        EXPECT_EQ(next, end);
      }
    }
  }
}

}  // namespace
}  // namespace thalweg::tensor_set_test
