// This header makes random values for the fields of messages, for tests.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/ipc/message.h"

namespace thalweg::ipc {

class RandomFields {
 public:
  explicit RandomFields(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }
  std::string Bytes(size_t size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

 protected:
  uint32_t U32() { return static_cast<uint32_t>(random_()); }
  double Real() { return std::normal_distribution<double>()(random_); }
  std::string Text() { return Bytes(Below(20)); }
  BucketId Id() { return {U32(), U32()}; }
  GradientPath AnyPath() { return static_cast<GradientPath>(1 + Below(4)); }
  DeviceMemory Memory() { return {Text(), Text(), Text()}; }
  template <typename Number>
  std::vector<Number> Numbers() {
    std::vector<Number> numbers(Below(4));
    for (Number& number : numbers) number = static_cast<Number>(random_());
    return numbers;
  }
  std::optional<JobTerms> Known() { return Below(2) == 0 ? std::nullopt : std::optional(Terms()); }
  JobTerms Terms() {
    return {Numbers<uint64_t>(), U32(), Numbers<uint32_t>(), std::vector<double>(Below(4), Real())};
  }
  CodecPolicy AnyCodec() {
    CodecSpec codec;
    if (Below(2) == 0) codec.kind = CodecKind::kPowerSgd;
    codec.wire = static_cast<DType>(1 + Below(3));
    // Other kinds have no such keys, so parsing returns their defaults.
    if (codec.kind == CodecKind::kPowerSgd) codec.rank = 1 + Below(8);
    return {codec, {}};
  }
  std::vector<ShardPlace> Places() { return std::vector<ShardPlace>(Below(4), {Text(), U32()}); }
  CollectiveKind AnyKind() { return static_cast<CollectiveKind>(1 + Below(8)); }
  Fold AnyFold() { return static_cast<Fold>(Below(9)); }
  DType AnyDType() { return static_cast<DType>(1 + Below(4)); }
  std::optional<UpdateRule> Rule() {
    if (Below(2) == 0) return std::nullopt;
    return UpdateRule{.optimizer = static_cast<Optimizer>(1 + Below(3)),
                      .decoupled = Below(2) == 0,
                      .nesterov = Below(2) == 0,
                      .maximize = Below(2) == 0,
                      .commits = Below(2) == 0,
                      .groups = std::vector<uint32_t>(Below(4), U32()),
                      .down = static_cast<WireFormat>(1 + Below(9)),
                      .ahead = U32(),
                      .alone = Below(2) == 0,
                      .delay_aware = Below(2) == 0,
                      .quorum = U32(),
                      .grace_ms = U32(),
                      .drops_late = Below(2) == 0};
  }
  GroupStep Step() { return {Real(), Real(), Real(), Real(), Real(), Real(), Real(), Real()}; }
  BucketLayout Layout() {
    BucketLayout layout{AnyDType(), std::vector<TensorSpec>(Below(6))};
    for (TensorSpec& tensor : layout.tensors) {
      tensor = {Text(), std::vector<int64_t>(Below(5))};
      for (int64_t& dim : tensor.shape) dim = static_cast<int64_t>(Below(1000));
    }
    return layout;
  }

  std::mt19937_64 random_;
};

}  // namespace thalweg::ipc
