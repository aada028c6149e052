#include "server/sidecar/codec/streaming_copy.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace thalweg {
namespace {

TEST(StreamingCopyTest, AllElementsAndNoOthersAreWrittenWhereverTheyLie) {
  std::vector<float> values(200);
  std::iota(values.begin(), values.end(), 1.0F);
  for (size_t from = 0; from < 5; ++from) {
    for (size_t to = 0; to < 17; ++to) {
      for (const size_t elems : {0u, 1u, 15u, 16u, 17u, 64u, 150u}) {
        std::vector<float> copy(200, -1.0F), expected(200, -1.0F);
        std::copy_n(values.begin() + from, elems, expected.begin() + to);
        StreamingCopy({values.data() + from, elems}, copy.data() + to);
        ASSERT_EQ(copy, expected) << elems << " elements from " << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace thalweg
