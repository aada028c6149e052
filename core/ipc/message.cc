#include "core/ipc/message.h"

#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"

namespace thalweg::ipc {
namespace {

constexpr uint32_t kMagic = 0x31574854;  // "THW1"
constexpr uint16_t kFlagFd = 1;
constexpr uint16_t kTypes = std::variant_size_v<Message>;
constexpr const char* kNames[kTypes] = {
    "Hello",       "Welcome", "RegisterBucket", "BucketReady", "Submit",    "Complete",
    "Fail",        "Leave",   "GetCodecState",  "CodecState",  "Precision", "HostShard",
    "ShardHosted", "Alive",   "MakeGroup",      "ShareArena",  "Collect",   "Collected",
    "Taken",       "Send",    "Receive"};

template <typename T>
concept Integer = std::unsigned_integral<T> || std::same_as<T, int64_t>;

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
  void Field(const double& value) { Field(std::bit_cast<uint64_t>(value)); }
  void Field(const CodecPolicy& value) { Field(value.ToString()); }
  void Field(const absl::StatusCode& value) { Field(static_cast<uint32_t>(value)); }
  void Field(const BucketLayout& layout);
  void Field(const DeviceMemory& memory) {
    for (const std::string* part : {&memory.uuid, &memory.memory, &memory.event}) Field(*part);
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

 private:
  std::string& out_;
};

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

void Writer::Field(const BucketLayout& layout) {
  Field(layout.dtype);
  Field(static_cast<uint32_t>(layout.tensors.size()));
  for (const TensorSpec& tensor : layout.tensors) {
    Field(tensor.name);
    Field(static_cast<uint32_t>(tensor.shape.size()));
    for (const int64_t dim : tensor.shape) Field(dim);
  }
}

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
void Reader::Field(CollectiveKind& value) { Numbered(value, "collective", ", expected 1 to 9"); }
void Reader::Field(Fold& value) { Numbered(value, "fold", ", expected 0 to 8"); }
void Reader::Field(GradientPath& value) { Numbered(value, "gradients' path", ", expected 1 to 4"); }

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

// Fields lists each message's fields once for both directions. M is the message, const when it is
// written.
template <typename M, typename T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

template <typename Archive, typename... Fields>
void All(Archive& archive, Fields&... fields) {
  (archive.Field(fields), ...);
}

void Visit(auto& archive, Is<Hello> auto& m) {
  All(archive, m.ipc_version, m.job, m.rank, m.world_size, m.node, m.num_nodes, m.node_name,
      m.local_rank, m.local_size, m.codec, m.chunk_bytes, m.timeout_ms, m.step_timeout_ms, m.path,
      m.probe, m.shards, m.secret);
}
void Visit(auto& archive, Is<Welcome> auto& m) {
  All(archive, m.epoch, m.num_shards, m.server_version, m.chunk_bytes, m.path, m.placement);
}
void Visit(auto& archive, Is<RegisterBucket> auto& m) {
  All(archive, m.id.index, m.id.generation, m.layout, m.memory);
}
void Visit(auto& archive, Is<BucketReady> auto& m) {
  All(archive, m.id.index, m.id.generation, m.memory);
}
void Visit(auto& archive, Is<Submit> auto& m) {
  All(archive, m.id.index, m.id.generation, m.round, m.unused);
}
void Visit(auto& archive, Is<Complete> auto& m) {
  All(archive, m.id.index, m.id.generation, m.round, m.workers, m.nonfinite_elems,
      m.wire_bytes_sent, m.wire_bytes_received, m.reduce_ns, m.wait_ns, m.wire_ns, m.decode_ns,
      m.compressed_since, m.residual_norm, m.error_ratio);
}
void Visit(auto& archive, Is<Fail> auto& m) { All(archive, m.code, m.message); }
void Visit(auto&, Is<Leave> auto&) {}
void Visit(auto&, Is<GetCodecState> auto&) {}
void Visit(auto& archive, Is<CodecState> auto& m) { All(archive, m.bytes); }
void Visit(auto& archive, Is<Precision> auto& m) { All(archive, m.loss_scale, m.skipped_steps); }

void Visit(auto& archive, Is<HostShard> auto& m) { All(archive, m.ipc_version, m.job, m.secret); }
void Visit(auto& archive, Is<ShardHosted> auto& m) { All(archive, m.address, m.aggregators); }
void Visit(auto&, Is<Alive> auto&) {}
void Visit(auto& archive, Is<MakeGroup> auto& m) { All(archive, m.group, m.rank, m.nodes, m.name); }
void Visit(auto& archive, Is<ShareArena> auto& m) { All(archive, m.number, m.bytes); }
void Visit(auto& archive, Is<Collect> auto& m) {
  All(archive, m.group, m.sequence, m.kind, m.fold, m.dtype, m.root, m.elems, m.timeout_ms, m.arena,
      m.values);
}
void Visit(auto& archive, Is<Collected> auto& m) {
  All(archive, m.group, m.sequence, m.bytes, m.arena, m.offset, m.from, m.values);
}
void Visit(auto& archive, Is<Taken> auto& m) { All(archive, m.group, m.sequence); }
void Visit(auto& archive, Is<Send> auto& m) {
  All(archive, m.group, m.call, m.to, m.tag, m.bytes, m.timeout_ms, m.arena, m.values);
}
void Visit(auto& archive, Is<Receive> auto& m) {
  All(archive, m.group, m.call, m.from, m.tag, m.bytes, m.timeout_ms);
}

template <typename T>
absl::StatusOr<Message> ParseAs(const char* name, std::span<const std::byte> body) {
  T message;
  Reader reader(name, body);
  if constexpr (requires { message.ipc_version; }) reader.ExpectVersion();
  Visit(reader, message);
  THALWEG_RETURN_IF_ERROR(reader.Finish());
  return Message(std::move(message));
}

template <size_t... Index>
absl::StatusOr<Message> ParseIndex(size_t index, std::span<const std::byte> body,
                                   std::index_sequence<Index...>) {
  using Parse = absl::StatusOr<Message> (*)(const char*, std::span<const std::byte>);
  constexpr Parse kParse[] = {&ParseAs<std::variant_alternative_t<Index, Message>>...};
  return kParse[index](kNames[index], body);
}

absl::Status CheckType(uint16_t type) {
  if (type >= 1 && type <= kTypes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("frame of type ", type, ", expected 1 to ", kTypes));
}

}  // namespace

const char* Name(const Message& message) { return kNames[message.index()]; }

std::string EncodeFrame(const Message& message, bool has_fd) {
  std::string body;
  Writer body_writer(body);
  std::visit([&](const auto& m) { Visit(body_writer, m); }, message);
  std::string frame;
  frame.reserve(kFrameHeaderBytes + body.size());
  Writer writer(frame);
  const auto type = static_cast<uint16_t>(message.index() + 1);
  const uint16_t flags = has_fd ? kFlagFd : 0;
  All(writer, kMagic, type, flags);
  writer.Field(static_cast<uint32_t>(body.size()));
  return frame.append(body);
}

absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const std::byte> bytes) {
  uint32_t magic = 0;
  uint16_t flags = 0;
  FrameHeader header;
  Reader reader("frame header", bytes);
  All(reader, magic, header.type, flags, header.body_bytes);
  THALWEG_RETURN_IF_ERROR(reader.Finish());
  if (magic != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat("frame begins with 0x", absl::Hex(magic),
                                                   ", expected 0x", absl::Hex(kMagic),
                                                   ": the peer is not a Thalweg process"));
  }
  THALWEG_RETURN_IF_ERROR(CheckType(header.type));
  if (flags > kFlagFd) {
    return absl::InvalidArgumentError(absl::StrCat("frame has flags ", flags, ", expected 0 or 1"));
  }
  if (header.body_bytes > kMaxFrameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "frame of ", header.body_bytes, " bytes, at most ", kMaxFrameBytes, " are allowed"));
  }
  header.has_fd = flags == kFlagFd;
  return header;
}

absl::StatusOr<Message> ParseBody(uint16_t type, std::span<const std::byte> body) {
  THALWEG_RETURN_IF_ERROR(CheckType(type));
  return ParseIndex(type - 1, body, std::make_index_sequence<kTypes>());
}

}  // namespace thalweg::ipc
