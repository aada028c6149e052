#include "server/sidecar/codec/part.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {

Part::Part(BucketId id, BucketLayout layout, WireFormat wire, uint64_t chunk_bytes,
           uint32_t num_shards)
    : bucket{id, std::move(layout), wire, 0},
      plan(ChunkPlan::For(bucket.layout.Elems(), bucket.layout.dtype, wire, chunk_bytes,
                          num_shards)) {}

void Part::SetUpdate(const UpdateRule& update, uint64_t chunk_bytes, uint32_t num_shards) {
  bucket.update = update;
  plan = PlanOfUpdated(bucket.layout, bucket.wire, chunk_bytes, num_shards);
}

bool Part::ResultsComeIn(WireFormat format) const {
  if (gives_squares()) return format == WireFormat::kFloat64;
  if (!bucket.update) return format == bucket.wire;
  const bool may_be_whole = bucket.update->sends_differences();
  return format == bucket.update->down || (may_be_whole && format == WireFormat::kFloat32);
}

uint64_t Part::ResultElems(uint32_t chunk) const {
  if (!gives_squares()) return plan.Elems(chunk);
  return NumSquares() * GranulesIn(bucket.layout, plan.Begin(chunk), plan.Begin(chunk + 1));
}

void Part::BeginRound(UpdateRound what) {
  ++round;
  kind = what;
  in_flight = true;
  claimed.assign(plan.Count(), false);
  sent.resize(plan.Count());
  finished_chunks = 0;
  workers = 0;
  nonfinite_elems = 0;
}

absl::Status Part::Claim(const RoundResult& r) {
  if (!in_flight || r.id.round != round || r.id.chunk >= plan.Count() || !ResultsComeIn(r.wire) ||
      r.elems != ResultElems(r.id.chunk) ||
      !IsPayloadSize(r.wire, r.elems, r.payload.SizeBytes())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "got ", r.elems, " ", Name(r.wire), " values in ", r.payload.SizeBytes(),
        " bytes for chunk ", r.id.chunk, ", round ", r.id.round, " of bucket ", ToString(bucket.id),
        ", whose round ", round, in_flight ? " is in flight" : " is complete"));
  }
  if (claimed[r.id.chunk]) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", r.id.chunk, " of bucket ", ToString(bucket.id), " came twice"));
  }
  claimed[r.id.chunk] = true;
  return absl::OkStatus();
}

bool Part::FinishChunk(const RoundResult& result) {
  workers = result.workers;
  nonfinite_elems += result.nonfinite_elems;
  if (++finished_chunks == plan.Count()) in_flight = false;
  return !in_flight;
}

}  // namespace thalweg
