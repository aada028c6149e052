#include "core/ipc/message_reader.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"

namespace thalweg::ipc {

void Reader::Refuse(const std::string& why) {
  if (ok()) status_ = absl::InvalidArgumentError(absl::StrCat(message_, ": ", why));
}

bool Reader::Need(uint64_t bytes, const char* what) {
  if (ok() && rest_.size() < bytes) {
    Refuse(absl::StrCat(what, " needs ", bytes, " bytes, ", rest_.size(), " are left"));
  }
  return ok();
}

void Reader::ExpectVersion() {
  Reader ahead = *this;
  uint32_t version = kIpcVersion;
  ahead.Field(version);
  if (version != kIpcVersion) {
    Refuse(absl::StrCat("worker speaks ipc version ", version, ", this sidecar ", kIpcVersion,
                        "; install the same Thalweg version for both"));
  }
}

uint32_t Reader::Count(uint32_t limit, uint64_t item_bytes, const char* what) {
  uint32_t count = 0;
  Field(count);
  if (count > limit) Refuse(absl::StrCat(count, " ", what, ", at most ", limit, " are allowed"));
  return Need(count * item_bytes, what) ? count : 0;
}

void Reader::Field(std::string& value) {
  const uint32_t size = Count(kMaxFrameBytes, 1, "text");
  value.assign(reinterpret_cast<const char*>(rest_.data()), size);
  rest_ = rest_.subspan(size);
}

template <typename Enum>
void Reader::Numbered(Enum& value, const char* what, const char* expected) {
  uint8_t raw = 0;
  Field(raw);
  if (!IsValid(static_cast<Enum>(raw))) return Refuse(absl::StrCat(what, " ", raw, expected));
  value = static_cast<Enum>(raw);
}

void Reader::Field(DType& value) { Numbered(value, "element type", ", expected 1 to 9"); }
void Reader::Field(CollectiveKind& value) { Numbered(value, "collective", ", expected 1 to 8"); }
void Reader::Field(Fold& value) { Numbered(value, "fold", ", expected 0 to 8"); }
void Reader::Field(GradientPath& value) { Numbered(value, "gradients' path", ", expected 1 to 4"); }

void Reader::Field(Optimizer& value) { Numbered(value, "optimizer", ", expected 1 to 3"); }
void Reader::Field(UpdateRound& value) { Numbered(value, "kind of round", ", expected 0 to 2"); }
void Reader::Field(SnapshotAction& value) { Numbered(value, "action", ", expected 1 to 3"); }
void Reader::Field(WireFormat& value) {
  Numbered(value, "wire format", ", expected 1 to 9 or 16 to 18");
}

void Reader::Field(bool& value) {
  uint8_t raw = 0;
  Field(raw);
  if (raw > 1) return Refuse(absl::StrCat("yes or no is ", raw, ", expected 0 or 1"));
  value = raw == 1;
}

void Reader::Field(double& value) {
  uint64_t bits = 0;
  Field(bits);
  value = std::bit_cast<double>(bits);
}

void Reader::Field(CodecPolicy& value) {
  std::string text;
  Field(text);
  if (!ok()) return;
  auto policy = CodecPolicy::Parse(text);
  if (!policy.ok()) return Refuse(std::string(policy.status().message()));
  if (policy->ToString() != text) {
    return Refuse(absl::StrCat("codec '", text, "' is not canonical"));
  }
  value = *std::move(policy);
}

void Reader::Field(absl::StatusCode& value) {
  uint32_t raw = 0;
  Field(raw);
  if (raw < 1 || raw > 16) return Refuse(absl::StrCat("status code ", raw, ", expected 1 to 16"));
  value = static_cast<absl::StatusCode>(raw);
}

void Reader::Field(BucketLayout& layout) {
  Field(layout.dtype);
  if (ok() && !IsFloat(layout.dtype)) {
    return Refuse(absl::StrCat("a bucket of type ", Name(layout.dtype), ", expected floats"));
  }
  constexpr uint64_t kLeastTensorBytes = 8;  // two empty lists
  const uint32_t tensors = Count(kMaxTensors, kLeastTensorBytes, "tensors");
  layout.tensors.resize(tensors);
  uint64_t bucket_elems = 0;
  for (TensorSpec& tensor : layout.tensors) {
    ReadTensor(tensor, bucket_elems);
    if (!ok()) return;
  }
}

void Reader::ReadTensor(TensorSpec& tensor, uint64_t& bucket_elems) {
  Field(tensor.name);
  tensor.shape.resize(Count(kMaxDims, sizeof(int64_t), "dimensions"));
  // 0 counts as 1, so that an overflow does not depend on the order of the dimensions.
  uint64_t elems = 1;
  for (int64_t& dim : tensor.shape) {
    Field(dim);
    if (dim < 0) return Refuse(absl::StrCat("tensor '", tensor.name, "' has dimension ", dim));
    const uint64_t factor = dim == 0 ? 1 : static_cast<uint64_t>(dim);
    if (factor > kMaxBucketElems / elems) {
      return Refuse(
          absl::StrCat("tensor '", tensor.name, "' has more than ", kMaxBucketElems, " elements"));
    }
    elems *= factor;
  }
  bucket_elems += elems;
  if (bucket_elems > kMaxBucketElems) {
    Refuse(absl::StrCat("bucket has more than ", kMaxBucketElems, " elements"));
  }
}

absl::Status Reader::Finish() {
  if (ok() && !rest_.empty()) {
    Refuse(absl::StrCat(rest_.size(), " bytes too many after the last field"));
  }
  return status_;
}

}  // namespace thalweg::ipc
