// For tests: what members have in common whom nobody asks for weights, residuals or results.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/exchange/member.h"

namespace thalweg {

class UnaskedMember : public Member {
 public:
  absl::Status Supply(RoundResult) override { return Unasked(); }
  absl::StatusOr<std::vector<float>> ReadResidual(BucketId, uint32_t, TimePoint) override {
    return std::vector<float>();
  }
  absl::Status WriteResidual(BucketId, uint32_t, std::span<const float>, TimePoint) override {
    return Unasked();
  }
  absl::Status SetSettings(uint64_t, const UpdateStep&, TimePoint) override { return Unasked(); }
  absl::StatusOr<WeightsSlice> ReadWeights(BucketId, uint32_t, uint32_t, TimePoint) override {
    return Unasked();
  }
  absl::Status WriteWeights(BucketId, uint32_t, uint32_t, WeightsSlice, TimePoint) override {
    return Unasked();
  }

 private:
  static absl::Status Unasked() { return absl::UnimplementedError("nobody asks"); }
};

}  // namespace thalweg
