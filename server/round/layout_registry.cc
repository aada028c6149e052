#include "server/round/layout_registry.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Bounds on what a peer can make a shard remember.
constexpr uint32_t kMaxBuckets = 1 << 16;
constexpr uint64_t kMaxBucketElems = uint64_t{1} << 40;

}  // namespace

absl::Status LayoutRegistry::Register(const std::string& owner, BucketId id,
                                      const BucketLayout& layout, uint64_t placement) {
  if (id.index >= kMaxBuckets || layout.Elems() > kMaxBucketElems) {
    return absl::InvalidArgumentError(absl::StrCat(owner, " announced bucket ", ToString(id),
                                                   " with ", layout.Elems(),
                                                   " elements, beyond any bucket's limits"));
  }
  const auto found = entries_.find(id.index);
  if (found != entries_.end() && id.generation < found->second.generation) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(id), ", but ", found->second.owner,
                     " uses layout ", found->second.generation, " of it already"));
  }
  if (found != entries_.end() && id.generation == found->second.generation) {
    const Entry& entry = found->second;
    THALWEG_RETURN_IF_ERROR(CheckSameLayout(id, entry.layout, entry.owner, layout, owner));
    if (placement == entry.placement) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(owner, " and ", entry.owner, " send chunks of bucket ", ToString(id),
                     " to different shards: do all nodes run the same release, and did they "
                     "announce their buckets in the same order?"));
  }
  entries_.insert_or_assign(
      id.index, Entry{id.generation, layout, placement, owner,
                      ChunkPlan::For(layout.Elems(), layout.dtype, chunk_bytes_, num_shards_)});
  return absl::OkStatus();
}

absl::Status LayoutRegistry::Check(const Contribution& c) const {
  const auto found = entries_.find(c.id.bucket.index);
  if (found == entries_.end() || found->second.generation != c.id.bucket.generation) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(c.id.bucket), " has not been registered"));
  }
  const Entry& entry = found->second;
  if (c.id.chunk >= entry.plan.Count()) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(c.id.bucket), " has ",
                                                   entry.plan.Count(), " chunks, got chunk ",
                                                   c.id.chunk));
  }
  const DType wire = WireType(entry.layout.dtype, codec_);
  const uint64_t elems = entry.plan.Elems(c.id.chunk);
  if (c.wire != wire || c.elems != elems || c.payload.SizeBytes() != elems * SizeOf(wire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket), ": expected ",
                     elems, " ", Name(wire), " values, got ", c.elems, " ", Name(c.wire),
                     " values in ", c.payload.SizeBytes(), " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace thalweg
