#include "core/ipc/message.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/ipc/message_reader.h"
#include "core/ipc/message_writer.h"

namespace thalweg::ipc {
namespace {

constexpr uint32_t kMessageMagic = 0x31574854;  // "THW1"
constexpr uint16_t kFlagFd = 1;
constexpr uint16_t kTypes = std::variant_size_v<Message>;
constexpr const char* kNames[kTypes] = {
    "Hello",         "Welcome",      "RegisterBucket", "BucketReady",
    "Submit",        "Complete",     "Fail",           "Leave",
    "GetCodecState", "CodecState",   "Precision",      "HostShard",
    "ShardHosted",   "Alive",        "MakeGroup",      "ShareArena",
    "Collect",       "Collected",    "Taken",          "Send",
    "Receive",       "SetSettings",  "GetWeights",     "Weights",
    "WeightsTaken",  "GetSnapshots", "Snapshots",      "CollectedPart",
    "Placed",        "KeptBucket",   "KeptResult",     "CodecMemory",
    "Lost"};

void Visit(auto& archive, Is<Hello> auto& m) {
  All(archive, m.ipc_version, m.job, m.rank, m.world_size, m.node, m.num_nodes, m.node_name,
      m.local_rank, m.local_size, m.codec, m.chunk_bytes, m.timeout_ms, m.step_timeout_ms, m.path,
      m.probe, m.shards, m.secret, m.known, m.kept_buckets, m.compressed_since, m.min_nodes,
      m.loss_grace_ms, m.returns);
}
void Visit(auto& archive, Is<Welcome> auto& m) {
  All(archive, m.epoch, m.num_shards, m.server_version, m.chunk_bytes, m.path, m.placement);
  Fields(archive, m.terms);
}
void Visit(auto& archive, Is<RegisterBucket> auto& m) {
  All(archive, m.id.index, m.id.generation, m.layout, m.memory, m.update);
}
void Visit(auto& archive, Is<BucketReady> auto& m) {
  All(archive, m.id.index, m.id.generation, m.memory);
}
void Visit(auto& archive, Is<Submit> auto& m) {
  All(archive, m.id.index, m.id.generation, m.round, m.unused, m.settings, m.kind, m.waited_ns);
}
void Visit(auto& archive, Is<Complete> auto& m) {
  All(archive, m.id.index, m.id.generation, m.round, m.workers, m.nonfinite_elems,
      m.wire_bytes_sent, m.wire_bytes_received, m.link_bytes_sent, m.reduce_ns, m.wait_ns,
      m.wire_ns, m.decode_ns, m.compressed_since, m.residual_norm, m.error_ratio, m.squares);
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
void Visit(auto& archive, Is<CollectedPart> auto& m) {
  All(archive, m.group, m.sequence, m.arena, m.offset, m.begin, m.bytes);
}
void Visit(auto& archive, Is<Taken> auto& m) { All(archive, m.group, m.sequence); }
void Visit(auto& archive, Is<Send> auto& m) {
  All(archive, m.group, m.call, m.to, m.tag, m.bytes, m.timeout_ms, m.arena, m.values);
}
void Visit(auto& archive, Is<Receive> auto& m) {
  All(archive, m.group, m.call, m.from, m.tag, m.bytes, m.timeout_ms);
}

void Visit(auto& archive, Is<SetSettings> auto& m) {
  All(archive, m.number, m.step.groups, m.step.grad_scale, m.step.max_grad_norm,
      m.step.grad_squares, m.step.measures, m.step.waits_for_all, m.step.gives_nothing);
}
void Visit(auto& archive, Is<GetWeights> auto& m) {
  All(archive, m.id.index, m.id.generation, m.slice);
}
void Visit(auto& archive, Is<Weights> auto& m) {
  All(archive, m.id.index, m.id.generation, m.slice, m.steps, m.bytes);
}
void Visit(auto& archive, Is<WeightsTaken> auto& m) {
  All(archive, m.id.index, m.id.generation, m.slice);
}

void Visit(auto& archive, Is<GetSnapshots> auto& m) { All(archive, m.action, m.id); }
void Visit(auto& archive, Is<Snapshots> auto& m) {
  All(archive, m.report.has_begun, m.report.is_writing, m.report.complete);
}

void Visit(auto& archive, Is<Placed> auto& m) {
  All(archive, m.id.index, m.id.generation, m.shards, m.loads);
}
void Visit(auto& archive, Is<KeptBucket> auto& m) {
  All(archive, m.id.index, m.id.generation, m.layout, m.round, m.nonfinite_elems, m.shards, m.loads,
      m.has_codec_memory);
}
void Visit(auto& archive, Is<KeptResult> auto& m) { All(archive, m.id.index, m.id.generation); }
void Visit(auto& archive, Is<CodecMemory> auto& m) {
  All(archive, m.id.index, m.id.generation, m.bytes);
}
void Visit(auto& archive, Is<Lost> auto& m) { All(archive, m.node, m.why); }

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
  All(writer, kMessageMagic, type, flags);
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
  if (magic != kMessageMagic) {
    return absl::InvalidArgumentError(absl::StrCat("frame begins with 0x", absl::Hex(magic),
                                                   ", expected 0x", absl::Hex(kMessageMagic),
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
