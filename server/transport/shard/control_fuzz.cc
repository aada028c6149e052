// Control requests and chunks of nodes, in any order, to an aggregator with little memory: all
// nodes that get a result get the same bytes, and when they have left, nothing of them stays. Each
// step is a byte for what is done, one for the node, two for a length, and so many bytes of a
// message.

#include <google/protobuf/stubs/logging.h>
#include <spdlog/spdlog.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/base/fuzzing.h"
#include "server/aggregator/aggregator.h"
#include "server/base/metrics.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/update_codec.h"

namespace thalweg {
namespace {

constexpr size_t kNodes = 4;
constexpr uint64_t kMemory = 16 << 20;

// A Shelf has the results of the rounds of one input, which jobs share: once a node has left, a
// round's name may come again.
struct Shelf {
  std::map<std::pair<std::string, RoundId>, std::string> results;
  std::set<BucketId> apart;  // whose nodes may get other weights in rounds of one number
};

struct Sink : ServedNode {
  Sink(std::string of, Shelf& on) : job(std::move(of)), shelf(on) {}

  void OnResult(RoundResult result) override {
    if (IsLetter(result.id) || result.payload.SizeBytes() == 0) return;
    if (shelf.apart.contains(result.id.bucket)) return;
    std::string bytes;
    for (const auto& piece : result.payload.pieces) {
      bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    const auto [found, is_first] = shelf.results.try_emplace({job, result.id}, bytes);
    Promise(is_first || found->second == bytes, "all nodes get the same bytes");
  }
  void OnFailed(absl::Status why) override { Promise(!why.ok(), "a failure is no success"); }

  const std::string job;
  Shelf& shelf;
};

// Returns the shard that all inputs use, one after the other.
Aggregator& TheShard() {
  static MetricRegistry registry;
  static Aggregator shard({.memory_bytes = kMemory}, registry);
  return shard;
}

// Returns the request of a node that joins two of its kind, or what `bytes` change of it.
absl::StatusOr<JoinRequest> ParseJoin(const std::string& bytes, size_t node) {
  v1::JoinRequest proto;
  proto.set_min_wire_version(kWireVersion);
  proto.set_max_wire_version(kWireVersion);
  proto.set_job("job");
  proto.set_node(static_cast<uint32_t>(node));
  proto.set_workers(1);
  proto.set_num_nodes(2);
  proto.set_world_size(2);
  proto.set_num_shards(1);
  proto.set_chunk_bytes(kMinChunkBytes);
  proto.set_codec("fp32");
  proto.set_round_timeout_ms(1000);
  v1::JoinRequest change;
  if (!change.ParseFromString(bytes)) return absl::InvalidArgumentError("no JoinRequest");
  proto.MergeFrom(change);
  return FromProto(proto);
}

class Script {
 public:
  explicit Script(FuzzInput input) : input_(input) {}

  void Run() {
    // A step is 4 bytes at least, so that there are only so many.
    while (!input_.IsEmpty()) Step();
    for (auto& give_up : give_up_) {
      if (give_up != nullptr) give_up(absl::CancelledError("the input is over"));
    }
    for (auto& member : members_) member.reset();
    Promise(shard_.num_jobs() == 0, "no job stays without nodes");
    Promise(shard_.Report(Now()).memory_reserved_bytes == 0, "no memory stays reserved");
  }

 private:
  void Step() {
    const uint8_t what = input_.Byte();
    const size_t node = input_.Byte() % kNodes;
    const std::string bytes = input_.Text(input_.Short());
    if (what % 13 == 0) return Join(node, bytes);
    if (what % 13 == 1) return shard_.Tick(Now() + std::chrono::seconds(bytes.size()));
    if (what % 13 == 2) return Leave(node);
    if (members_[node] != nullptr) Call(what % 13, *members_[node], bytes);
  }

  void Join(size_t node, const std::string& bytes) {
    const auto request = ParseJoin(bytes, node);
    if (!request.ok() || members_[node] != nullptr || give_up_[node] != nullptr) return;
    const auto joined = [this, node](absl::StatusOr<std::unique_ptr<Member>> member) {
      if (member.ok()) members_[node] = *std::move(member);
    };
    give_up_[node] = shard_.BeginJoin(*request, std::make_shared<Sink>(request->job, shelf_),
                                      Now() + std::chrono::hours(1), joined);
  }

  template <typename Proto>
  static bool Parse(const std::string& bytes, Proto* proto) {
    return proto->ParseFromString(bytes);
  }

  void Call(int what, Member& member, const std::string& bytes) {
    const TimePoint by = Now();
    if (v1::RegisterBucketRequest r; what == 12 && Parse(bytes, &r)) {
      if (const auto bucket = FromProto(r); bucket.ok()) Register(member, *bucket);
    } else if (v1::MakeGroupRequest r; what == 3 && Parse(bytes, &r)) {
      if (const auto group = FromProto(r); group.ok()) Note(member.MakeGroup(*group, by));
    } else if (what == 4 || what == 5) {
      Contribute(member, bytes);
    } else if (what == 6) {
      CallResidual(member, bytes);
    } else if (what == 7 || what == 8) {
      CallWeights(what == 8, member, bytes);
    } else if (v1::SetSettingsRequest r; what == 9 && Parse(bytes, &r)) {
      const auto step = FromProto(r);
      if (step.ok()) Note(member.SetSettings(r.number(), *step, by));
    } else if (v1::SnapshotsRequest r; what == 10 && Parse(bytes, &r)) {
      if (const auto call = FromProto(r); call.ok()) Note(member.Snapshots(*call, by).status());
    } else if (what == 11) {
      Note(member.Heartbeat(by).status());
    }
  }

  void Register(Member& member, const BucketAnnouncement& bucket) {
    const auto& update = bucket.update;
    if (update && (update->has_own_rounds() || update->ahead > 0)) shelf_.apart.insert(bucket.id);
    Note(member.Register(bucket, Now()));
  }

  void Contribute(Member& member, const std::string& bytes) {
    const grpc::Slice slice(bytes);
    auto frame = ParseFrame(grpc::ByteBuffer(&slice, 1));
    auto* chunk = frame.ok() ? std::get_if<ChunkFrame>(&*frame) : nullptr;
    if (chunk == nullptr) return;
    Note(chunk->header.kind == ChunkKind::kResult
             ? member.Supply(ToResult(chunk->header, std::move(chunk->payload)))
             : member.Contribute(ToContribution(chunk->header, std::move(chunk->payload))));
  }

  void CallResidual(Member& member, const std::string& bytes) {
    v1::WriteResidualRequest r;
    const auto values =
        Parse(bytes, &r)
            ? FloatsFromBytes(r.values())
            : absl::StatusOr<std::vector<float>>(absl::InvalidArgumentError("no request"));
    if (!values.ok()) return;
    const BucketId bucket = FromProto(r.bucket());
    const absl::Status written = member.WriteResidual(bucket, r.chunk(), *values, Now());
    const auto read = member.ReadResidual(bucket, r.chunk(), Now());
    Promise(!written.ok() || (read.ok() && *read == *values), "what is written can be read");
    Note(written);
    Note(read.status());
  }

  void CallWeights(bool writes, Member& member, const std::string& bytes) {
    v1::WriteWeightsRequest r;
    if (!Parse(bytes, &r)) return;
    auto values = FloatsFromBytes(r.values());
    if (!values.ok()) return;
    const BucketId bucket = FromProto(r.bucket());
    if (writes) {
      Note(member.WriteWeights(bucket, r.chunk(), r.slice(), {*std::move(values), r.steps()},
                               Now()));
    }
    Note(member.ReadWeights(bucket, r.chunk(), r.slice(), Now()).status());
  }

  void Leave(size_t node) {
    if (members_[node] == nullptr && give_up_[node] != nullptr) {
      give_up_[node](absl::CancelledError("gave up"));
    }
    members_[node].reset();
    give_up_[node] = nullptr;
    shelf_ = {};
  }

  // A failure for which no cause was foreseen is a fault of ours.
  static void Note(const absl::Status& status) {
    Promise(!absl::IsInternal(status) && !absl::IsUnknown(status), "refusals say what is wrong");
  }

  FuzzInput input_;
  Aggregator& shard_ = TheShard();
  Shelf shelf_;
  std::array<ServedShard::GiveUp, kNodes> give_up_;
  std::array<std::unique_ptr<Member>, kNodes> members_;
};

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  spdlog::set_level(spdlog::level::off);
  google::protobuf::SetLogHandler(nullptr);
  thalweg::Script(thalweg::FuzzInput(data, size)).Run();
  return 0;
}
