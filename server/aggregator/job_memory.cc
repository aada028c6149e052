#include "server/aggregator/job_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"

namespace thalweg {

JobMemory::JobMemory(const JoinRequest& first, const Parts& parts, MemoryBudget& memory,
                     ShardMetrics& metrics)
    : own_bytes_(OwnBytes(first)),
      shard_(first.shard),
      num_nodes_(first.num_nodes),
      parts_(parts),
      metrics_(metrics),
      reservation_(std::in_place, memory) {}

uint64_t JobMemory::OwnBytes(const JoinRequest& first) {
  // Beside the objects: a node has its name three times, a shard some numbers in LinkRates, its
  // host, its share and the reports of these, and a policy is kept parsed, and as text in reports.
  constexpr uint64_t kOfJob = 16 << 10;
  constexpr uint64_t kOfNode = 3 * kMaxNameBytes;
  constexpr uint64_t kOfShard = 96;
  constexpr uint64_t kTimesPolicy = 8;
  return kOfJob + first.num_nodes * kOfNode + first.num_shards * kOfShard +
         first.codec.ToString().size() * kTimesPolicy;
}

void JobMemory::ChargeTo(std::shared_ptr<TenantAccount> account) {
  if (account_ != nullptr || account == nullptr) return;
  account_ = std::move(account);
  reservation_.emplace(account_->memory);
}

absl::Status JobMemory::Reserve() {
  const auto& [plan, rounds, letters] = parts_;
  // The nodes' windows also bound the results that are kept: on each stream as many as one window
  // holds, because the nodes share them.
  const uint64_t held = rounds.max_held_bytes();
  const uint64_t windows = held + held / num_nodes_ * most_streams_;
  const uint64_t layouts = rounds.layouts().bytes();
  const uint64_t resumption = rounds.resumption_bytes(plan.MostBytesOfResult());
  const uint64_t state_bytes = rounds.state_bytes();
  const uint64_t states = state_bytes * (has_copies_ ? 2 : 1);
  const absl::Status reserved = reservation_->Resize(own_bytes_ + windows + layouts + states +
                                                     resumption + letters.max_bytes());
  if (reserved.ok()) {
    states_ = state_bytes;
    return reserved;
  }
  return absl::Status(
      reserved.code(),
      absl::StrCat("aggregator shard ", shard_, ": the job ", reserved.message(), " (", windows,
                   " for ", num_nodes_, " nodes with windows of ", plan.flow().window_chunks,
                   " chunks of ", plan.flow().chunk_bytes, " bytes and results on ", most_streams_,
                   most_streams_ == 1 ? " stream, " : " streams, ", layouts, " for layouts, ",
                   states, " for residuals and weights",
                   has_copies_ ? " and copies of them for snapshots, " : ", ", resumption,
                   " for resuming, ", letters.max_bytes(), " for letters, ", own_bytes_,
                   " for itself); raise the shard's limit (THALWEG_MEMORY_LIMIT) or the "
                   "tenant's quota, add aggregators, or lower THALWEG_WINDOW_CHUNKS or "
                   "THALWEG_CHUNK_BYTES"));
}

absl::Status JobMemory::ReserveStates() {
  return parts_.rounds.state_bytes() == states_ ? absl::OkStatus() : Reserve();
}

absl::Status JobMemory::ReserveStreams(uint32_t streams) {
  if (streams <= most_streams_) return absl::OkStatus();
  most_streams_ = streams;
  return Reserve();
}

absl::Status JobMemory::ReserveCopies() {
  const bool had = std::exchange(has_copies_, true);
  absl::Status status = Reserve();
  if (!status.ok()) has_copies_ = had;
  return status;
}

void JobMemory::Show() {
  const JobRounds& rounds = parts_.rounds;
  Show({rounds.held_bytes(), rounds.max_held_bytes(), rounds.states().bytes()});
}

void JobMemory::End() {
  reservation_->Release();
  states_ = parts_.rounds.state_bytes();  // no longer reserved, nor needed
  Show({.state_bytes = parts_.rounds.states().bytes()});
}

void JobMemory::Show(const Held& held) {
  const auto show = [](Gauge& gauge, uint64_t bytes, uint64_t shown) {
    if (bytes != shown) gauge.Add(static_cast<double>(bytes) - static_cast<double>(shown));
  };
  show(metrics_.held_bytes, held.bytes, shown_.bytes);
  show(metrics_.held_limit_bytes, held.limit_bytes, shown_.limit_bytes);
  show(metrics_.residual_bytes, held.state_bytes, shown_.state_bytes);
  shown_ = held;
}

}  // namespace thalweg
