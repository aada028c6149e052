// This header makes messages of every type with random contents for tests.
#pragma once

#include <string>
#include <vector>

#include "core/ipc/message.h"
#include "core/ipc/random_fields.h"

namespace thalweg::ipc {

class RandomMessages : public RandomFields {
 public:
  using RandomFields::RandomFields;

  // `type` counts from 0, in the order of Message's alternatives.
  Message OfType(size_t type) {
    switch (type) {
      case 0:
        return Hello{kIpcVersion, Text(),    U32(),    U32(),      U32(),        U32(),
                     Text(),      U32(),     U32(),    AnyCodec(), random_(),    random_(),
                     random_(),   AnyPath(), Memory(), Places(),   Text(),       Known(),
                     U32(),       random_(), U32(),    random_(),  Below(2) == 0};
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
        return Complete{
            Id(),      random_(), U32(),     random_(), random_(),
            random_(), random_(), random_(), random_(), random_(),
            random_(), random_(), Real(),    Real(),    std::vector<double>(Below(4), Real())};
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
        return SetSettings{random_(),
                           {std::vector<GroupStep>(Below(4), Step()), Real(), Real(), Real(),
                            Below(2) == 0, Below(2) == 0, Below(2) == 0}};
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
            Id(),         Layout(), random_(), random_(), Numbers<uint32_t>(), Numbers<uint64_t>(),
            Below(2) == 0};
      case 30:
        return KeptResult{Id()};
      case 31:
        return CodecMemory{Id(), random_()};
      default:
        return Lost{Text(), Text()};
    }
  }
  Message Any() { return OfType(Below(std::variant_size_v<Message>)); }
};

}  // namespace thalweg::ipc
