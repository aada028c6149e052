#include "server/plan/job_plan.h"

#include <algorithm>

#include "core/base/protocol.h"

namespace thalweg {

JobPlan::JobPlan(const JoinRequest& first, uint32_t max_window_chunks)
    : first_(first),
      max_window_chunks_(max_window_chunks),
      costs_(first.costs.size()),
      rates_(first.num_nodes, HostsOf(first)) {}

void JobPlan::Learn(const JoinRequest& request) {
  const LinkSpeed& link = request.link;
  const bool slower =
      slowest_.bytes_per_second <= 0 || link.bytes_per_second < slowest_.bytes_per_second;
  if (link.bytes_per_second > 0 && slower) slowest_ = link;
  for (size_t i = 0; i < costs_.size(); ++i) costs_[i] = Slower(costs_[i], request.costs[i]);
  rates_.Add(request.node, request.shard_rates);
}

void JobPlan::Choose() {
  if (first_.shard == 0) shares_ = PlanShares(rates_.Resolve());
  const std::vector<uint32_t> equal(first_.num_shards, 1);
  flow_ =
      PlanFlow(slowest_, first_.shard == 0 ? shares_.shares : equal, first_.codec.fallback.wire);
  if (first_.chunk_bytes != 0) flow_.chunk_bytes = first_.chunk_bytes;
  if (first_.window_chunks != 0) flow_.window_chunks = first_.window_chunks;
  flow_.window_chunks = std::min(flow_.window_chunks, max_window_chunks_);
}

void JobPlan::Keep(uint64_t chunk_bytes, const std::vector<uint32_t>& shares) {
  flow_.chunk_bytes = chunk_bytes;
  if (shares.size() == shares_.shares.size()) shares_.shares = shares;
}

uint64_t JobPlan::MostBytesOfResult() const {
  // An update's results may be wider than what nodes contribute.
  uint64_t most = 2 * flow_.chunk_bytes;
  for (const CodecSpec& codec : first_.codec.Codecs()) {
    if (codec.kind != CodecKind::kLossy) continue;
    const WireFormat wire = LossyFormat(codec);
    const LossyTraits traits = *FindLossy(wire);
    const uint64_t scaled = std::min(traits.chunk_scale * flow_.chunk_bytes, kMaxChunkBytes);
    const uint64_t elems = traits.chunk_elems > 0
                               ? traits.chunk_elems
                               : std::max(flow_.chunk_bytes, scaled) / sizeof(float);
    most = std::max(most, MaxEncodedBytes(wire, elems));
  }
  return most;
}

Terms JobPlan::TermsOf(uint64_t epoch) const {
  return {.epoch = epoch,
          .chunk_bytes = flow_.chunk_bytes,
          .window_chunks = flow_.window_chunks,
          .link = slowest_,
          .costs = costs_,
          .shares = shares_.shares,
          .forecast = shares_.forecast};
}

}  // namespace thalweg
