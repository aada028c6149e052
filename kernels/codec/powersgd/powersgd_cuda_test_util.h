// This header makes buckets of matrices for the tests of PowerSGD on GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast/element.h"
#include "kernels/codec/powersgd/powersgd_cuda.h"
#include "kernels/launch/test_device.h"

namespace thalweg {

using Floats = std::vector<float>;

inline std::vector<uint32_t> BitsOf(const Floats& values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(BitCast<uint32_t>(value));
  return bits;
}

// A PowerSgdBucket has the arrays of a bucket. The memory between the matrices must not change.
struct PowerSgdBucket {
  // Matrices and factors begin at multiples of `alignment` elements.
  PowerSgdBucket(std::span<const FactorShape> shapes, size_t alignment, uint32_t seed) {
    uint64_t elems = 0;
    uint64_t p_elems = 0;
    uint64_t q_elems = 0;
    const auto place = [&](uint64_t* end, uint64_t size) {
      const uint64_t begin = (*end + 1 + alignment - 1) / alignment * alignment;
      *end = begin + size;
      return begin;
    };
    for (const FactorShape& shape : shapes) {
      const uint64_t at = place(&elems, shape.rows * shape.cols);
      const uint64_t p_at = place(&p_elems, shape.rows * shape.rank);
      const uint64_t q_at = place(&q_elems, shape.cols * shape.rank);
      matrices.push_back({shape, at, p_at, q_at});
    }
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](Floats& values, uint64_t count) {
      for (uint64_t i = 0; i <= count; ++i) values.push_back(normal(random));
    };
    fill(gradient, elems);
    fill(error, elems);
    fill(p, p_elems);
    fill(q, q_elems);
  }

  std::span<float> Of(const PlacedMatrix& m, Floats& values) const {
    if (values.empty()) return {};
    return std::span(values).subspan(m.offset, m.shape.rows * m.shape.cols);
  }
  std::span<float> P(const PlacedMatrix& m) {
    return std::span(p).subspan(m.p_offset, m.shape.rows * m.shape.rank);
  }
  std::span<float> Q(const PlacedMatrix& m) {
    return std::span(q).subspan(m.q_offset, m.shape.cols * m.shape.rank);
  }

  std::vector<PlacedMatrix> matrices;
  Floats gradient;
  Floats error;  // empty: no error feedback
  Floats p;
  Floats q;
};

// A BucketOnDevice is a bucket in device memory, `shift` elements after a multiple of 256 bytes.
class BucketOnDevice {
 public:
  explicit BucketOnDevice(const PowerSgdBucket& bucket, size_t shift = 0)
      : plan(PowerSgdPlan::Make(bucket.matrices).value()),
        gradient(bucket.gradient, shift * sizeof(float)),
        p(bucket.p, shift * sizeof(float)),
        q(bucket.q, shift * sizeof(float)),
        nonfinite(std::vector<uint64_t>{0}),
        has_error_(!bucket.error.empty()),
        error_(bucket.error, shift * sizeof(float)),
        zeroed_(std::vector<uint32_t>(plan.columns(), 7)),
        table_(std::vector<std::byte>(plan.table().begin(), plan.table().end()), 0),
        workspace_(plan.workspace_bytes()) {}

  float* error() const { return has_error_ ? error_.As<float>() : nullptr; }
  uint32_t* zeroed() const { return zeroed_.As<uint32_t>(); }
  PowerSgdMemory memory() const { return {table_.Data(), workspace_.As<double>()}; }

  Floats ErrorContent() const { return error_.ContentAs<float>(); }
  std::vector<uint32_t> ZeroedContent() const { return zeroed_.ContentAs<uint32_t>(); }
  uint64_t NonFinite() const { return nonfinite.ContentAs<uint64_t>()[0]; }

  const PowerSgdPlan plan;
  DeviceBuffer gradient;
  DeviceBuffer p;
  DeviceBuffer q;
  const DeviceBuffer nonfinite;

 private:
  const bool has_error_;
  const DeviceBuffer error_;
  const DeviceBuffer zeroed_;
  const DeviceBuffer table_;
  const DeviceBuffer workspace_;
};

inline void ExpectDone(const absl::Status& launched) {
  ASSERT_TRUE(launched.ok()) << launched;
  ASSERT_TRUE(FinishDevice().ok());
}

}  // namespace thalweg
