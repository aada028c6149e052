// This header makes messages of every type with random contents for tests.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/ipc/message.h"

namespace thalweg::ipc {

class RandomMessages {
 public:
  explicit RandomMessages(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  // `type` counts from 0, in the order of Message's alternatives.
  Message OfType(size_t type) {
    switch (type) {
      case 0:
        return Hello{kIpcVersion, Text(),   U32(),      U32(),     U32(),     U32(),     Text(),
                     U32(),       U32(),    AnyCodec(), random_(), random_(), random_(), AnyPath(),
                     Memory(),    Places(), Text(),     Known(),   U32()};
      case 1:
        return Welcome{random_(), U32(), Text(), random_(), AnyPath(), Text(), Terms()};
      case 2:
        return RegisterBucket{Id(), Layout(), Memory(), Rule()};
      case 3:
        return BucketReady{Id(), Memory()};
      case 4:
        return Submit{Id(), random_(), std::vector<uint32_t>(Below(4), U32()), random_(),
                      static_cast<UpdateRound>(Below(3))};
      case 5:
        return Complete{Id(),      random_(),
                        U32(),     random_(),
                        random_(), random_(),
                        random_(), random_(),
                        random_(), random_(),
                        random_(), Real(),
                        Real(),    std::vector<double>(Below(4), Real())};
      case 6:
        return Fail{static_cast<absl::StatusCode>(1 + Below(16)), Text()};
      case 7:
        return Leave{};
      case 8:
        return GetCodecState{};
      case 9:
        return CodecState{random_()};
      case 10:
        return Precision{Real(), random_()};
      case 11:
        return HostShard{kIpcVersion, Text(), Text()};
      case 12:
        return ShardHosted{Text(), std::vector<std::string>(Below(4), Text())};
      case 13:
        return Alive{};
      case 14:
        return MakeGroup{U32(), U32(), std::vector<uint32_t>(Below(4), U32()), Text()};
      case 15:
        return ShareArena{U32(), random_()};
      case 16:
        return Collect{U32(), random_(), AnyKind(), AnyFold(), AnyDType(),
                       U32(), random_(), random_(), U32(),     Text()};
      case 17:
        return Collected{U32(), random_(), random_(), U32(), random_(), U32(), Text()};
      case 18:
        return Taken{U32(), random_()};
      case 19:
        return Send{U32(), random_(), U32(), random_(), random_(), random_(), U32(), Text()};
      case 20:
        return Receive{U32(), random_(), U32(), random_(), random_(), random_()};
      case 21:
        return SetSettings{
            random_(),
            {std::vector<GroupStep>(Below(4), Step()), Real(), Real(), Real(), Below(2) == 0}};
      case 22:
        return GetWeights{Id(), U32()};
      case 23:
        return Weights{Id(), U32(), random_(), random_()};
      case 24:
        return WeightsTaken{Id(), U32()};
      case 25:
        return GetSnapshots{static_cast<SnapshotAction>(1 + Below(3)), {random_(), random_()}};
      case 26:
        return Snapshots{{std::vector<SnapshotId>(Below(4), {random_(), random_()}), Below(2) == 0,
                          Below(2) == 0}};
      case 27:
        return CollectedPart{U32(), random_(), U32(), random_(), random_(), random_()};
      case 28:
        return Placed{Id(), Numbers<uint32_t>(), Numbers<uint64_t>()};
      case 29:
        return KeptBucket{
            Id(), Layout(), random_(), random_(), Numbers<uint32_t>(), Numbers<uint64_t>()};
      default:
        return KeptResult{Id()};
    }
  }
  Message Any() { return OfType(Below(std::variant_size_v<Message>)); }

  std::string Bytes(size_t size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

 private:
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
  JobTerms Terms() { return {Numbers<uint64_t>(), U32(), Numbers<uint32_t>()}; }
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
                      .delay_aware = Below(2) == 0};
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
