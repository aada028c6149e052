#include "server/sidecar/node_entry.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/plan/share_plan.h"
#include "server/sidecar/codec/codec_costs.h"

namespace thalweg {
namespace {

// Says how the nodes use the shards, for a job of several nodes, and logs it. All nodes have the
// same plan, so one says it aloud.
std::string AnnouncePlacement(const ipc::Hello& job, const SharePlan& plan) {
  if (job.num_nodes == 1) return "";
  std::string placement = Describe(plan);
  spdlog::log(job.node == 0 ? spdlog::level::info : spdlog::level::debug, "job '{}': {}", job.job,
              placement);
  return placement;
}

}  // namespace

std::vector<uint32_t> HostsOf(const std::vector<ShardPlace>& shards) {
  std::vector<uint32_t> hosts;
  for (const ShardPlace& place : shards) hosts.push_back(place.host);
  return hosts;
}

void TellReady(Roster& roster, uint32_t local_rank, NodeBucket& bucket) {
  if (const CodecMemory* const memory = bucket.codec_memory();
      memory != nullptr && local_rank == 0) {
    const BucketArena& arena = memory->arena();
    roster.Tell(local_rank, ipc::CodecMemory{bucket.id(), arena.payload_bytes()}, arena.fd());
  }
  const BucketMemory& memory = bucket.memory();
  roster.Tell(local_rank, ipc::BucketReady{bucket.id(), memory.ResultFor(local_rank)},
              memory.result().fd());
}

absl::Status NodeEntry::Enter(TimePoint deadline) {
  const auto& known = parts_.spec.known;
  return known ? TakeUp(*known, deadline) : Join(deadline);
}

absl::Status NodeEntry::Join(TimePoint deadline) {
  const auto& [spec, patience, context, signer, shards, compression, buckets, kept, roster] =
      parts_;
  THALWEG_RETURN_IF_ERROR(shards.Join(MakeRequest(), events_of_, deadline));
  const Terms agreed = shards.agreed();
  const SharePlan plan = shards.plan();
  compression.Agree(agreed, plan.forecast);
  OpenBuckets(agreed.chunk_bytes);
  spdlog::info(
      "job '{}': node {} of {} with {} workers, {} shards, {} on the wire in chunks of {} KiB",
      spec.job, spec.node, spec.num_nodes, spec.local_size, shards.size(), spec.codec.ToString(),
      agreed.chunk_bytes >> 10);
  Welcome(agreed.chunk_bytes,
          {shards.epochs(), agreed.window_chunks, plan.shares, compression.measured()},
          AnnouncePlacement(spec, plan));
  return absl::OkStatus();
}

absl::Status NodeEntry::TakeUp(const ipc::JobTerms& known, TimePoint deadline) {
  const auto& [spec, patience, context, signer, shards, compression, buckets, kept, roster] =
      parts_;
  THALWEG_RETURN_IF_ERROR(kept.Await(deadline));
  THALWEG_RETURN_IF_ERROR(compression.Restore(known.measured, spec.compressed_since));
  OpenBuckets(spec.chunk_bytes);
  THALWEG_ASSIGN_OR_RETURN(
      KeptBuckets::Restored restored,
      kept.Restore(buckets, spec.world_size,
                   [&roster = roster](uint32_t local_rank) { return roster.NameOf(local_rank); }));
  KeptPlaces place{{}, known.shares, std::move(restored.buckets)};
  for (const uint64_t epoch : known.epochs) {
    place.terms.push_back({epoch, spec.chunk_bytes, known.window_chunks});
  }
  THALWEG_RETURN_IF_ERROR(shards.TakeUp(MakeRequest(), place, events_of_, deadline));
  context.metrics.taken_up_jobs.Add(1);
  spdlog::warn("job '{}': node {} goes on with {} buckets that its workers have kept", spec.job,
               spec.node, restored.answers.size() / spec.local_size);
  for (KeptBuckets::Answer& answer : restored.answers) {
    TellReady(roster, answer.local_rank, *answer.bucket);
    if (!answer.missed) continue;
    compression.Describe(*answer.missed);
    roster.Tell(answer.local_rank, *answer.missed);
  }
  Welcome(spec.chunk_bytes, known, "");
  return absl::OkStatus();
}

JoinRequest NodeEntry::MakeRequest() const {
  const ipc::Hello& spec = parts_.spec;
  JoinRequest request;
  request.job = spec.job;
  request.node = spec.node;
  request.node_name = spec.node_name;
  request.workers = spec.local_size;
  request.num_nodes = spec.num_nodes;
  request.world_size = spec.world_size;
  request.chunk_bytes = spec.chunk_bytes;
  request.window_chunks = parts_.context.window_chunks;
  request.codec = spec.codec;
  request.round_timeout = parts_.patience.step.shard();
  request.identity = IdentityOf(parts_.signer.get());
  request.signer = parts_.signer;
  request.hosts = HostsOf(spec.shards);
  request.losses = {spec.min_nodes, FromMillis(spec.loss_grace_ms)};
  request.costs =
      MeasureCosts(parts_.compression.candidates(), spec.num_nodes, parts_.context.threads);
  return request;
}

void NodeEntry::OpenBuckets(uint64_t chunk_bytes) {
  const ipc::Hello& spec = parts_.spec;
  BucketTerms terms;
  terms.job = spec.job;
  terms.codec = spec.codec;
  terms.chunk_bytes = chunk_bytes;
  terms.num_shards = parts_.shards.size();
  terms.num_nodes = spec.num_nodes;
  terms.local_size = spec.local_size;
  terms.device = parts_.roster.ChoosePaths() ? parts_.context.gpus : &parts_.context.device;
  terms.path = parts_.roster.first_path();
  terms.patience = parts_.patience.silence.sidecar();
  terms.keeps_codecs = spec.returns && spec.num_nodes > 1 && !spec.secret.empty() &&
                       terms.device != parts_.context.gpus;
  parts_.buckets.Open(terms);
}

void NodeEntry::Welcome(uint64_t chunk_bytes, ipc::JobTerms terms, std::string placement) {
  parts_.roster.Welcome({parts_.shards.agreed().epoch, parts_.shards.size(), THALWEG_VERSION,
                         chunk_bytes, GradientPath::kCpu, std::move(placement), std::move(terms)});
}

}  // namespace thalweg
