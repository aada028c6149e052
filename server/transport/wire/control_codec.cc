#include "server/transport/wire/control_codec.h"

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "server/base/printable.h"
#include "server/transport/wire/losses_codec.h"
#include "server/transport/wire/update_codec.h"

namespace thalweg {
namespace {

// This limit is far beyond any model; multiplied by an element's size it cannot overflow uint64_t.
constexpr uint64_t kMaxBucketElems = uint64_t{1} << 48;
constexpr std::chrono::milliseconds kMaxRoundTimeout = std::chrono::hours(24);
constexpr std::chrono::microseconds kMaxRoundTrip = std::chrono::hours(1);

// Converts `value` to a DType or a WireFormat; `values` names the valid ones for the error message.
template <typename Enum>
absl::StatusOr<Enum> ToEnum(int value, const char* what, const char* values) {
  const auto converted = static_cast<Enum>(value);
  if (value < 0 || value > 255 || !IsValid(converted)) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is ", value, ", expected ", values));
  }
  return converted;
}

// Adds the tensor's elements to `total`.
absl::Status Count(const TensorSpec& tensor, uint64_t* total) {
  if (!tensor.name.empty()) THALWEG_RETURN_IF_ERROR(CheckName("tensor name", tensor.name));
  uint64_t elems = 1;
  for (int64_t dim : tensor.shape) {
    if (dim < 0 || (dim > 0 && elems > kMaxBucketElems / static_cast<uint64_t>(dim))) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name,
                                                     "' has a dimension of ", dim,
                                                     ": its elements cannot be counted"));
    }
    elems *= static_cast<uint64_t>(dim);
  }
  *total += elems;
  if (*total > kMaxBucketElems) {
    return absl::InvalidArgumentError(absl::StrCat("bucket has more than ", kMaxBucketElems,
                                                   " elements at tensor '", tensor.name, "'"));
  }
  return absl::OkStatus();
}

absl::Status CheckNumber(const char* what, double value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", value, ", expected a finite number of 0 or more"));
}

// Reads the link's speed from a JoinRequest or a JoinResponse; CostsOf reads the costs from either.
template <class Proto>
absl::StatusOr<LinkSpeed> LinkOf(const Proto& proto) {
  const double rate = proto.link_bytes_per_second();
  if (!std::isfinite(rate) || rate < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("link_bytes_per_second is ", rate, ", expected a finite rate of 0 or more"));
  }
  if (proto.link_round_trip_us() > static_cast<uint64_t>(kMaxRoundTrip.count())) {
    return absl::InvalidArgumentError(absl::StrCat("link_round_trip_us is ",
                                                   proto.link_round_trip_us(),
                                                   ", expected at most ", kMaxRoundTrip.count()));
  }
  return LinkSpeed{rate, std::chrono::microseconds(proto.link_round_trip_us())};
}

template <class Proto>
absl::StatusOr<std::vector<CodecCost>> CostsOf(const Proto& proto) {
  if (proto.costs_size() > static_cast<int>(kMaxCodecs)) {
    return absl::InvalidArgumentError(absl::StrCat("costs are those of ", proto.costs_size(),
                                                   " codecs, expected at most ", kMaxCodecs));
  }
  std::vector<CodecCost> costs;
  for (const v1::CodecCost& cost : proto.costs()) {
    for (const double seconds : {cost.node(), cost.shard(), cost.factors()}) {
      if (std::isfinite(seconds) && seconds >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "costs contain ", seconds, ", expected finite numbers of seconds of 0 or more"));
    }
    costs.push_back({cost.node(), cost.shard(), cost.factors()});
  }
  return costs;
}

absl::StatusOr<std::vector<uint32_t>> SharesOf(const v1::JoinResponse& proto) {
  const uint64_t sum = std::accumulate(proto.shares().begin(), proto.shares().end(), uint64_t{0});
  if (proto.shares_size() > 0 && sum != kShareTotal) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the aggregator answered with shares that sum up to ", sum, ", expected ", kShareTotal));
  }
  return std::vector<uint32_t>(proto.shares().begin(), proto.shares().end());
}

absl::StatusOr<ShareForecast> ForecastOf(const v1::ShareForecast& proto) {
  THALWEG_RETURN_IF_ERROR(CheckNumber("seconds_per_byte", proto.seconds_per_byte()));
  THALWEG_RETURN_IF_ERROR(CheckNumber("ring_seconds_per_byte", proto.ring_seconds_per_byte()));
  THALWEG_RETURN_IF_ERROR(CheckNumber("load", proto.load()));
  THALWEG_RETURN_IF_ERROR(
      CheckNumber("advised_seconds_per_byte", proto.advised_seconds_per_byte()));
  // A later release may know more advice.
  const Advice advice =
      v1::Advice_IsValid(proto.advice()) ? static_cast<Advice>(proto.advice()) : Advice::kNone;
  return ShareForecast{proto.seconds_per_byte(),
                       proto.ring_seconds_per_byte(),
                       proto.at_shard(),
                       proto.number(),
                       proto.load(),
                       advice,
                       proto.advised_seconds_per_byte()};
}

template <class Proto>
std::vector<BucketRounds> RoundsOf(const Proto& proto) {
  std::vector<BucketRounds> all;
  for (const v1::BucketRounds& each : proto) {
    all.push_back({FromProto(each.bucket()), {each.rounds().begin(), each.rounds().end()}});
  }
  return all;
}

template <class Proto>
void SetRounds(const std::vector<BucketRounds>& all, Proto* proto) {
  for (const BucketRounds& each : all) {
    v1::BucketRounds& out = *proto->Add();
    *out.mutable_bucket() = ToProto(each.bucket);
    out.mutable_rounds()->Add(each.rounds.begin(), each.rounds.end());
  }
}

// A host crosses the network as its number plus 1, and kNoHost as 0.
static_assert(kNoHost + 1 == 0);

template <class Proto>
void SetLinkAndCosts(const LinkSpeed& link, const std::vector<CodecCost>& costs, Proto* proto) {
  proto->set_link_bytes_per_second(link.bytes_per_second);
  proto->set_link_round_trip_us(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(link.round_trip).count()));
  for (const CodecCost& cost : costs) {
    v1::CodecCost& out = *proto->add_costs();
    out.set_node(cost.node);
    out.set_shard(cost.shard);
    out.set_factors(cost.factors);
  }
}

}  // namespace

v1::JoinRequest ToProto(const JoinRequest& request) {
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  v1::JoinRequest proto;
  proto.set_min_wire_version(kWireVersion);
  proto.set_max_wire_version(kWireVersion);
  proto.set_job(request.job);
  proto.set_node(request.node);
  proto.set_node_name(request.node_name);
  proto.set_workers(request.workers);
  proto.set_num_nodes(request.num_nodes);
  proto.set_world_size(request.world_size);
  proto.set_shard(request.shard);
  proto.set_num_shards(request.num_shards);
  proto.set_chunk_bytes(request.chunk_bytes);
  proto.set_codec(request.codec.ToString());
  proto.set_round_timeout_ms(
      static_cast<uint64_t>(duration_cast<milliseconds>(request.round_timeout).count()));
  proto.set_window_chunks(request.window_chunks);
  proto.set_identity(request.identity);
  SetLinkAndCosts(request.link, request.costs, &proto);
  for (const uint32_t host : request.hosts) proto.add_shard_hosts(host + 1);
  proto.mutable_shard_rates()->Add(request.shard_rates.begin(), request.shard_rates.end());
  proto.set_grace_ms(static_cast<uint64_t>(duration_cast<milliseconds>(request.grace).count()));
  SetLosses(request.losses, &proto);
  if (request.resume) SetRounds(*request.resume, proto.mutable_resume()->mutable_completed());
  return proto;
}

v1::JoinResponse ToProto(SessionToken token, const Terms& terms) {
  v1::JoinResponse proto;
  proto.set_wire_version(kWireVersion);
  proto.set_token(token);
  proto.set_epoch(terms.epoch);
  proto.set_window_chunks(terms.window_chunks);
  proto.set_server_version(THALWEG_VERSION);
  proto.set_chunk_bytes(terms.chunk_bytes);
  proto.set_weight(terms.weight);
  SetLinkAndCosts(terms.link, terms.costs, &proto);
  proto.set_resumed(terms.resumed);
  SetLosses(terms.losses, &proto);
  SetRounds(terms.wanted, proto.mutable_wanted());
  if (terms.shares.empty()) return proto;
  proto.mutable_shares()->Add(terms.shares.begin(), terms.shares.end());
  const ShareForecast& forecast = terms.forecast;
  v1::ShareForecast& out = *proto.mutable_forecast();
  out.set_seconds_per_byte(forecast.seconds_per_byte);
  out.set_ring_seconds_per_byte(forecast.ring_seconds_per_byte);
  out.set_at_shard(forecast.at_shard);
  out.set_number(forecast.number);
  out.set_load(forecast.load);
  out.set_advice(static_cast<v1::Advice>(forecast.advice));
  out.set_advised_seconds_per_byte(forecast.advised_seconds_per_byte);
  return proto;
}

v1::MakeGroupRequest ToProto(SessionToken token, const Group& group) {
  v1::MakeGroupRequest proto;
  proto.set_token(token);
  proto.set_group(group.id);
  for (const GroupMember& member : group.members) {
    proto.add_nodes(member.node);
    proto.add_workers(member.workers);
  }
  proto.set_window_chunks(group.window_chunks);
  return proto;
}

v1::BucketId ToProto(BucketId id) {
  v1::BucketId proto;
  proto.set_index(id.index);
  proto.set_generation(id.generation);
  proto.set_part(id.part);
  return proto;
}

BucketId FromProto(const v1::BucketId& proto) {
  return {proto.index(), proto.generation(), proto.part()};
}

std::string FloatsToBytes(std::span<const float> values) {
  static_assert(std::endian::native == std::endian::little);
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

absl::StatusOr<std::vector<float>> FloatsFromBytes(const std::string& bytes) {
  if (bytes.size() % sizeof(float) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "values have ", bytes.size(), " bytes, expected a multiple of ", sizeof(float)));
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

v1::RegisterBucketRequest ToProto(SessionToken token, const BucketAnnouncement& bucket) {
  v1::RegisterBucketRequest proto;
  proto.set_token(token);
  *proto.mutable_bucket() = ToProto(bucket.id);
  proto.set_dtype(static_cast<v1::DType>(bucket.layout.dtype));
  proto.set_wire(static_cast<v1::WireFormat>(bucket.wire));
  for (const TensorSpec& tensor : bucket.layout.tensors) {
    v1::Tensor& out = *proto.add_tensors();
    out.set_name(tensor.name);
    out.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  }
  proto.set_placement(bucket.placement);
  proto.set_raw_bytes(bucket.raw_bytes);
  if (bucket.update) *proto.mutable_update() = ToProto(*bucket.update);
  return proto;
}

absl::StatusOr<JoinRequest> FromProto(const v1::JoinRequest& proto) {
  if (proto.min_wire_version() > kWireVersion || proto.max_wire_version() < kWireVersion) {
    return absl::InvalidArgumentError(absl::StrCat(
        "node speaks wire versions ", proto.min_wire_version(), " to ", proto.max_wire_version(),
        ", this aggregator speaks ", kWireVersion, ": install the same release on both"));
  }
  if (proto.round_timeout_ms() > static_cast<uint64_t>(kMaxRoundTimeout.count())) {
    return absl::InvalidArgumentError(absl::StrCat("round_timeout_ms is ", proto.round_timeout_ms(),
                                                   ", expected at most ",
                                                   kMaxRoundTimeout.count()));
  }
  if (proto.grace_ms() > static_cast<uint64_t>(kMaxGrace.count())) {
    return absl::InvalidArgumentError(
        absl::StrCat("grace_ms is ", proto.grace_ms(), ", expected at most ", kMaxGrace.count()));
  }
  JoinRequest request;
  THALWEG_ASSIGN_OR_RETURN(request.codec, CodecPolicy::Parse(proto.codec()));
  THALWEG_ASSIGN_OR_RETURN(request.link, LinkOf(proto));
  THALWEG_ASSIGN_OR_RETURN(request.costs, CostsOf(proto));
  THALWEG_ASSIGN_OR_RETURN(request.losses, LossesOf(proto));
  request.node = proto.node();
  request.node_name = proto.node_name();
  request.workers = proto.workers();
  request.job = proto.job();
  request.num_nodes = proto.num_nodes();
  request.world_size = proto.world_size();
  request.shard = proto.shard();
  request.num_shards = proto.num_shards();
  request.chunk_bytes = proto.chunk_bytes();
  request.window_chunks = proto.window_chunks();
  request.round_timeout = std::chrono::milliseconds(proto.round_timeout_ms());
  request.grace = std::chrono::milliseconds(proto.grace_ms());
  for (const uint32_t host : proto.shard_hosts()) request.hosts.push_back(host - 1);
  for (const double rate : proto.shard_rates()) {
    THALWEG_RETURN_IF_ERROR(CheckNumber("one of shard_rates", rate));
    request.shard_rates.push_back(rate);
  }
  if (proto.has_resume()) {
    // Before they are copied; a bucket counts like a chunk.
    size_t numbers = 0;
    for (const auto& each : proto.resume().completed()) numbers += each.rounds_size() + 1;
    if (numbers > kMaxResumedChunks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "resume has the rounds of ", numbers, " chunks, expected at most ", kMaxResumedChunks));
    }
    request.resume = RoundsOf(proto.resume().completed());
  }
  return request;
}

absl::StatusOr<BucketAnnouncement> FromProto(const v1::RegisterBucketRequest& proto) {
  BucketAnnouncement bucket;
  bucket.id = FromProto(proto.bucket());
  if (proto.tensors_size() > static_cast<int>(kMaxBucketTensors)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(bucket.id), " has ", proto.tensors_size(),
                     " tensors, expected at most ", kMaxBucketTensors));
  }
  bucket.placement = proto.placement();
  bucket.raw_bytes = proto.raw_bytes();
  THALWEG_ASSIGN_OR_RETURN(bucket.layout.dtype,
                           ToEnum<DType>(proto.dtype(), "dtype of the bucket", "1 to 9"));
  THALWEG_ASSIGN_OR_RETURN(
      bucket.wire, ToEnum<WireFormat>(proto.wire(), "wire of the bucket", "1 to 9 or 16 to 18"));
  uint64_t elems = 0;
  for (const v1::Tensor& tensor : proto.tensors()) {
    TensorSpec spec{tensor.name(), {tensor.shape().begin(), tensor.shape().end()}};
    THALWEG_RETURN_IF_ERROR(Count(spec, &elems));
    bucket.layout.tensors.push_back(std::move(spec));
  }
  if (proto.has_update()) {
    THALWEG_ASSIGN_OR_RETURN(bucket.update, FromProto(proto.update()));
  }
  return bucket;
}

absl::StatusOr<Group> FromProto(const v1::MakeGroupRequest& proto) {
  if (proto.nodes_size() != proto.workers_size()) {
    return absl::InvalidArgumentError(absl::StrCat("group ", proto.group(), " has ",
                                                   proto.nodes_size(), " nodes and the workers of ",
                                                   proto.workers_size()));
  }
  Group group{proto.group(), {}, proto.window_chunks()};
  for (int i = 0; i < proto.nodes_size(); ++i) {
    group.members.push_back({proto.nodes(i), proto.workers(i)});
  }
  return group;
}

absl::StatusOr<Terms> FromProto(const v1::JoinResponse& proto) {
  if (proto.wire_version() != kWireVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the aggregator chose wire version ", proto.wire_version(),
                     ", this node speaks ", kWireVersion, ": install the same release on both"));
  }
  if (proto.token() == 0 || proto.window_chunks() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the aggregator answered with token ", proto.token(), " and a window of ",
                     proto.window_chunks(), " chunks, expected neither of them to be 0"));
  }
  if (proto.weight() > kMaxWeight) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the aggregator answered with weight ", proto.weight(), ", expected at most ", kMaxWeight));
  }
  if (proto.chunk_bytes() < kMinChunkBytes || proto.chunk_bytes() > kMaxChunkBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the aggregator answered with chunks of ",
                                                   proto.chunk_bytes(), " bytes, expected ",
                                                   kMinChunkBytes, " to ", kMaxChunkBytes));
  }
  Terms terms{proto.epoch(), proto.chunk_bytes(), proto.window_chunks(), proto.weight()};
  THALWEG_ASSIGN_OR_RETURN(terms.link, LinkOf(proto));
  THALWEG_ASSIGN_OR_RETURN(terms.costs, CostsOf(proto));
  THALWEG_ASSIGN_OR_RETURN(terms.losses, LossesOf(proto));
  THALWEG_ASSIGN_OR_RETURN(terms.shares, SharesOf(proto));
  THALWEG_ASSIGN_OR_RETURN(terms.forecast, ForecastOf(proto.forecast()));
  terms.resumed = proto.resumed();
  terms.wanted = RoundsOf(proto.wanted());
  return terms;
}

}  // namespace thalweg
