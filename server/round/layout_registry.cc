#include "server/round/layout_registry.h"

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Bounds on what a peer can make a shard remember.
constexpr uint32_t kMaxBuckets = 1 << 16;
constexpr uint64_t kMaxBucketElems = uint64_t{1} << 40;

absl::Status CheckSame(const BucketAnnouncement& a, const std::string& owner_a,
                       const BucketAnnouncement& b, const std::string& owner_b) {
  THALWEG_RETURN_IF_ERROR(CheckSameLayout(a.id, a.layout, owner_a, b.layout, owner_b));
  if (a.wire != b.wire) {
    return absl::InvalidArgumentError(absl::StrCat(owner_b, " sends bucket ", ToString(a.id),
                                                   " in ", Name(b.wire), ", ", owner_a, " in ",
                                                   Name(a.wire)));
  }
  if (a.placement == b.placement) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(owner_b, " and ", owner_a, " send chunks of bucket ", ToString(a.id),
                   " to different shards: do all nodes run the same release, and did they "
                   "announce their buckets in the same order?"));
}

}  // namespace

absl::Status LayoutRegistry::Register(const std::string& owner, const BucketAnnouncement& bucket) {
  const BucketId id = bucket.id;
  const BucketLayout& layout = bucket.layout;
  if (id.index >= kMaxBuckets || id.part >= kMaxParts || layout.Elems() > kMaxBucketElems) {
    return absl::InvalidArgumentError(absl::StrCat(owner, " announced bucket ", ToString(id),
                                                   " with ", layout.Elems(),
                                                   " elements, beyond any bucket's limits"));
  }
  const bool narrowed =
      layout.dtype == DType::kFloat32 && IsDense(bucket.wire) && SizeOf(DTypeOf(bucket.wire)) == 2;
  if (bucket.wire != FormatOf(layout.dtype) && !narrowed) {
    return absl::InvalidArgumentError(absl::StrCat(owner, " announced bucket ", ToString(id),
                                                   " of ", Name(layout.dtype), " to be sent in ",
                                                   Name(bucket.wire)));
  }
  const auto found = entries_.find({id.index, id.part});
  if (found != entries_.end() && id.generation < found->second.bucket.id.generation) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(id), ", but ", found->second.owner,
                     " uses layout ", found->second.bucket.id.generation, " of it already"));
  }
  if (found != entries_.end() && id == found->second.bucket.id) {
    return CheckSame(found->second.bucket, found->second.owner, bucket, owner);
  }
  entries_.insert_or_assign(
      {id.index, id.part},
      Entry{bucket, owner,
            ChunkPlan::For(layout.Elems(), layout.dtype, bucket.wire, chunk_bytes_, num_shards_)});
  return absl::OkStatus();
}

absl::Status LayoutRegistry::Check(const Contribution& c) const {
  const auto found = entries_.find({c.id.bucket.index, c.id.bucket.part});
  if (found == entries_.end() || found->second.bucket.id != c.id.bucket) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(c.id.bucket), " has not been registered"));
  }
  const Entry& entry = found->second;
  if (c.id.chunk >= entry.plan.Count()) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(c.id.bucket), " has ",
                                                   entry.plan.Count(), " chunks, got chunk ",
                                                   c.id.chunk));
  }
  const WireFormat wire = entry.bucket.wire;
  const uint64_t elems = entry.plan.Elems(c.id.chunk);
  if (c.wire != wire || c.elems != elems || !IsPayloadSize(wire, elems, c.payload.SizeBytes())) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket), ": expected ",
                     elems, " ", Name(wire), " values, got ", c.elems, " ", Name(c.wire),
                     " values in ", c.payload.SizeBytes(), " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace thalweg
