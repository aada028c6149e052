// For tests of topk: what its codec makes of floats on the processor.
#pragma once

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/codec/lossy_test_util.h"
#include "kernels/codec/topk/topk.h"

namespace thalweg {

struct TopKResult {
  Bytes bytes;
  Floats residual;
  uint64_t nonfinite = 0;
};

// An empty `residual` is none.
inline TopKResult EncodeTopKOnCpu(const Floats& values, const Floats& residual, uint64_t count) {
  TopKResult result;
  result.residual = residual;
  result.bytes.resize(MaxEncodedBytes(WireFormat::kTopK, values.size()));
  const Encoded encoded =
      EncodeTopK(values.data(), residual.empty() ? nullptr : result.residual.data(), values.size(),
                 count, result.bytes.data());
  result.bytes.resize(encoded.bytes);
  result.nonfinite = encoded.nonfinite_elems;
  return result;
}

inline void ExpectSame(const TopKResult& got, const TopKResult& expected) {
  ASSERT_EQ(got.bytes, expected.bytes);
  ASSERT_EQ(BitsOf(got.residual), BitsOf(expected.residual));
  ASSERT_EQ(got.nonfinite, expected.nonfinite);
}

}  // namespace thalweg
