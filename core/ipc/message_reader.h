// This header reads the fields of messages: see message.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "core/ipc/message.h"
#include "core/ipc/message_fields.h"

namespace thalweg::ipc {

// A Reader reads the same fields from untrusted bytes. After the first error it reads nothing more,
// and status() says what was wrong.
class Reader {
 public:
  Reader(const char* message, std::span<const std::byte> bytes) : message_(message), rest_(bytes) {}

  template <Integer T>
  void Field(T& value) {
    if (!Need(sizeof(T), "field")) return;
    std::make_unsigned_t<T> bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      bits |= static_cast<std::make_unsigned_t<T>>(
          std::to_integer<std::make_unsigned_t<T>>(rest_[i]) << (8 * i));
    }
    value = static_cast<T>(bits);
    rest_ = rest_.subspan(sizeof(T));
  }
  void Field(std::string& value);
  void Field(DType& value);
  void Field(GradientPath& value);
  void Field(CollectiveKind& value);
  void Field(Fold& value);
  void Field(Optimizer& value);
  void Field(UpdateRound& value);
  void Field(SnapshotAction& value);
  void Field(WireFormat& value);
  void Field(bool& value);
  void Field(double& value);
  void Field(CodecPolicy& value);
  void Field(absl::StatusCode& value);
  void Field(BucketLayout& layout);
  void Field(DeviceMemory& memory) {
    for (std::string* part : {&memory.uuid, &memory.memory, &memory.event}) Field(*part);
  }
  void Field(ShardPlace& place) {
    Field(place.address);
    Field(place.host);
  }
  void Field(std::vector<uint32_t>& tensors) {
    tensors.resize(Count(kMaxTensors, sizeof(uint32_t), "tensors"));
    for (uint32_t& tensor : tensors) Field(tensor);
  }
  void Field(std::vector<uint64_t>& numbers) {
    numbers.resize(Count(kMaxShards, sizeof(uint64_t), "shards"));
    for (uint64_t& number : numbers) Field(number);
  }
  void Field(SnapshotId& id) {
    Field(id.branch);
    Field(id.step);
  }
  void Field(std::vector<SnapshotId>& snapshots) {
    snapshots.resize(Count(kMaxListedSnapshots, sizeof(SnapshotId), "snapshots"));
    for (SnapshotId& id : snapshots) Field(id);
  }
  void Field(std::vector<GroupStep>& groups) {
    constexpr uint64_t kGroupBytes = 8 * sizeof(double);
    groups.resize(Count(kMaxUpdateGroups, kGroupBytes, "groups"));
    for (GroupStep& group : groups) Fields(*this, group);
  }
  void Field(std::vector<double>& values) {
    values.resize(Count(kMaxFrameBytes / sizeof(double), sizeof(double), "numbers"));
    for (double& value : values) Field(value);
  }
  template <typename Value>
  void Field(std::optional<Value>& value) {
    bool is_there = false;
    Field(is_there);
    if (is_there) Fields(*this, value.emplace());
  }
  template <typename Item>
  void Field(std::vector<Item>& list) {
    constexpr uint64_t kLeastItemBytes = 4;  // the length of an empty text
    list.resize(Count(kMaxShards, kLeastItemBytes, "shards"));
    for (Item& item : list) Field(item);
  }

  // Refuses a message whose first field, which stays to be read, says that another version of
  // Thalweg has sent it: its other fields may be different ones.
  void ExpectVersion();

  // Returns OK when all fields were there and valid, and no bytes are left.
  absl::Status Finish();

 private:
  bool ok() const { return status_.ok(); }
  // Reads a u8 that must be one of an enumeration's.
  template <typename Enum>
  void Numbered(Enum& value, const char* what, const char* expected);
  void Refuse(const std::string& why);
  bool Need(uint64_t bytes, const char* what);
  // Reads the count of a list whose items take at least `item_bytes` each.
  uint32_t Count(uint32_t limit, uint64_t item_bytes, const char* what);
  void ReadTensor(TensorSpec& tensor, uint64_t& bucket_elems);

  const char* message_;
  std::span<const std::byte> rest_;
  absl::Status status_;
};

}  // namespace thalweg::ipc
