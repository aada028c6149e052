// This header writes the fields of messages: see message.h.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/ipc/message.h"
#include "core/ipc/message_fields.h"

namespace thalweg::ipc {

// A Writer appends little-endian bytes.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  template <Integer T>
  void Field(const T& value) {
    const auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (size_t i = 0; i < sizeof(T); ++i) out_.push_back(static_cast<char>(bits >> (8 * i)));
  }
  void Field(const std::string& value) {
    Field(static_cast<uint32_t>(value.size()));
    out_.append(value);
  }
  void Field(const DType& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const GradientPath& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const CollectiveKind& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const Fold& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const Optimizer& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const UpdateRound& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const SnapshotAction& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const WireFormat& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const bool& value) { Field(static_cast<uint8_t>(value)); }
  void Field(const double& value) { Field(std::bit_cast<uint64_t>(value)); }
  void Field(const CodecPolicy& value) { Field(value.ToString()); }
  void Field(const absl::StatusCode& value) { Field(static_cast<uint32_t>(value)); }
  void Field(const BucketLayout& layout);
  void Field(const DeviceMemory& memory) {
    for (const std::string* part : {&memory.uuid, &memory.memory, &memory.event}) Field(*part);
  }
  void Field(const SnapshotId& id) {
    Field(id.branch);
    Field(id.step);
  }
  void Field(const ShardPlace& place) {
    Field(place.address);
    Field(place.host);
  }
  template <typename Item>
  void Field(const std::vector<Item>& list) {
    Field(static_cast<uint32_t>(list.size()));
    for (const Item& item : list) Field(item);
  }
  template <typename Value>
  void Field(const std::optional<Value>& value) {
    Field(value.has_value());
    if (value) Fields(*this, *value);
  }
  void Field(const GroupStep& step) { Fields(*this, step); }

 private:
  std::string& out_;
};

}  // namespace thalweg::ipc
