// For tests of the formats that cut a chunk into blocks, int8 and onebit: what a codec makes of
// floats on the processor, and what its definition says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "kernels/codec/feedback.h"
#include "kernels/codec/lossy_reference.h"

namespace thalweg {

struct BlockResult {
  Bytes bytes;
  Floats decoded;
  Floats residual;
  uint64_t nonfinite = 0;
};

struct BlockFormat {
  WireFormat format;
  uint64_t (*encode)(const float* values, Feedback feedback, size_t elems, std::byte* out);
  void (*decode)(const std::byte* in, size_t elems, float* out);
  ReferenceChunk (*reference)(const Floats& x);

  // An empty `residual` is none.
  BlockResult Encode(const Floats& values, const Floats& residual, size_t misalignment) const {
    BlockResult result;
    result.residual = residual;
    Buffer out(misalignment, MaxEncodedBytes(format, values.size()));
    result.nonfinite = encode(values.data(), residual.empty() ? nullptr : result.residual.data(),
                              values.size(), out.Data());
    result.bytes = out.Content();
    result.decoded.resize(values.size());
    decode(out.Data(), values.size(), result.decoded.data());
    return result;
  }

  // `x` is the sum of values and residual.
  BlockResult Reference(const Floats& x, const Floats& residual) const {
    auto [bytes, decoded] = reference(x);
    BlockResult result{std::move(bytes), std::move(decoded), {}, CountNonFinite(x)};
    if (!residual.empty()) result.residual = ResidualOf(x, result.decoded, residual);
    return result;
  }
};

inline void ExpectSame(const BlockResult& got, const BlockResult& expected) {
  ASSERT_EQ(got.bytes, expected.bytes);
  ASSERT_EQ(BitsOf(got.decoded), BitsOf(expected.decoded));
  ASSERT_EQ(BitsOf(got.residual), BitsOf(expected.residual));
  ASSERT_EQ(got.nonfinite, expected.nonfinite);
}

// Compares a codec with its definition for sizes around every block, all addresses and targets.
inline void ExpectDefinition(const BlockFormat& format, std::mt19937_64 random) {
  for (size_t elems : kLossySizes) {
    for (unsigned special_every : {0u, 40u, 3000u}) {
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats before = RandomFloats(elems, special_every * 2, random);
      const BlockResult plain = format.Reference(values, {});
      const BlockResult fed_back = format.Reference(Sum(values, before), before);
      for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
        SCOPED_TRACE(testing::Message() << hwy::TargetName(target) << ", " << elems
                                        << " elements, special " << special_every);
        const ForcedTarget forced(target);
        for (size_t misalignment : {0, 3}) {
          ExpectSame(format.Encode(values, {}, misalignment), plain);
          ExpectSame(format.Encode(values, before, misalignment), fed_back);
        }
      }
    }
  }
}

}  // namespace thalweg
