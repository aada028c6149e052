#include "server/round/layout_registry.h"

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// These bounds limit what a peer can make a shard store.
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
  if (a.update != b.update) {
    const auto name = [](const BucketAnnouncement& bucket) {
      return bucket.update ? ToString(*bucket.update) : std::string("none");
    };
    return absl::InvalidArgumentError(
        absl::StrCat(owner_b, " announced bucket ", ToString(a.id), " with update '", name(b),
                     "', ", owner_a, " with '", name(a), "', or with other groups of its tensors"));
  }
  if (a.placement == b.placement) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(owner_b, " and ", owner_a, " send chunks of bucket ", ToString(a.id),
                   " to different shards: do all nodes run the same release, and did they "
                   "announce their buckets in the same order?"));
}

// A chunk of a bucket with an update takes at least this: where it begins, and its pieces.
constexpr uint64_t kBytesOfChunk = sizeof(uint64_t) + 64 + sizeof(UpdatePiece);

}  // namespace

uint64_t LayoutRegistry::BytesOf(const BucketAnnouncement& bucket) const {
  uint64_t bytes = 512;  // of the entry itself, with its owner's name
  for (const TensorSpec& tensor : bucket.layout.tensors) {
    bytes += sizeof(TensorSpec) + tensor.name.size() + tensor.shape.size() * sizeof(int64_t);
    if (tensor.name.empty()) bytes += sizeof(ElemRange);
    if (bucket.update) bytes += sizeof(uint32_t) + sizeof(UpdatePiece);
  }
  if (!bucket.update) return bytes;
  const ChunkPlan plan = ChunkPlan::For(bucket.layout.Elems(), bucket.layout.dtype, bucket.wire,
                                        chunk_bytes_, num_shards_);
  return bytes + plan.Count() * kBytesOfChunk;
}

absl::Status LayoutRegistry::Register(const std::string& owner, const BucketAnnouncement& bucket) {
  const BucketId id = bucket.id;
  const BucketLayout& layout = bucket.layout;
  if (id.index >= kMaxBuckets || id.part >= kMaxParts || layout.Elems() > kMaxBucketElems) {
    return absl::InvalidArgumentError(absl::StrCat(owner, " announced bucket ", ToString(id),
                                                   " with ", layout.Elems(),
                                                   " elements, beyond any bucket's limits"));
  }
  const bool encoded = layout.dtype == DType::kFloat32 && bucket.wire != WireFormat::kFloat64;
  if (!IsFloat(layout.dtype) || (bucket.wire != FormatOf(layout.dtype) && !encoded)) {
    return absl::InvalidArgumentError(absl::StrCat(owner, " announced bucket ", ToString(id),
                                                   " of ", Name(layout.dtype), " to be sent in ",
                                                   Name(bucket.wire)));
  }
  if (bucket.update) {
    if (const absl::Status valid = Validate(*bucket.update, layout); !valid.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(owner, " announced bucket ", ToString(id), ": ", valid.message()));
    }
  }
  const auto found = entries_.find({id.index, id.part});
  if (IsReplaced(id)) {
    return absl::FailedPreconditionError(
        absl::StrCat(owner, " announced bucket ", ToString(id), ", but ", found->second.owner,
                     " uses layout ", found->second.bucket.id.generation, " of it already"));
  }
  if (found != entries_.end() && id == found->second.bucket.id) {
    return CheckSame(found->second.bucket, found->second.owner, bucket, owner);
  }
  const uint64_t replaced = found == entries_.end() ? 0 : BytesOf(found->second.bucket);
  const uint64_t bytes = bytes_ - replaced + BytesOf(bucket);
  if (bytes > kMaxBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(owner, " announced bucket ", ToString(id), " with ", layout.tensors.size(),
                     " tensors: the layouts of the job's buckets would take ", bytes,
                     " bytes, at most ", kMaxBytes, " are kept"));
  }
  bytes_ = bytes;
  if (found != entries_.end()) state_bytes_ -= StateBytesOf(found->second.bucket);
  state_bytes_ += StateBytesOf(bucket);
  entries_.insert_or_assign({id.index, id.part}, MakeEntry(owner, bucket));
  return absl::OkStatus();
}

LayoutRegistry::Entry LayoutRegistry::MakeEntry(const std::string& owner,
                                                const BucketAnnouncement& bucket) const {
  const BucketLayout& layout = bucket.layout;
  Entry entry{
      .bucket = bucket,
      .owner = owner,
      .plan = ChunkPlan::For(layout.Elems(), layout.dtype, bucket.wire, chunk_bytes_, num_shards_),
      .padding = layout.Padding(),
      .rule = nullptr,
      .pieces = {}};
  if (bucket.update) {
    entry.plan = PlanOfUpdated(layout, bucket.wire, chunk_bytes_, num_shards_);
    entry.rule = std::make_shared<const UpdateRule>(*bucket.update);
    for (std::vector<UpdatePiece>& pieces : PiecesOf(layout, *bucket.update, entry.plan)) {
      entry.pieces.push_back(std::make_shared<const std::vector<UpdatePiece>>(std::move(pieces)));
    }
  }
  return entry;
}

bool LayoutRegistry::IsReplaced(BucketId bucket) const {
  const auto found = entries_.find({bucket.index, bucket.part});
  return found != entries_.end() && bucket.generation < found->second.bucket.id.generation;
}

absl::StatusOr<const LayoutRegistry::Entry*> LayoutRegistry::Find(BucketId bucket,
                                                                  uint32_t chunk) const {
  const auto found = entries_.find({bucket.index, bucket.part});
  if (found == entries_.end() || found->second.bucket.id != bucket) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", ToString(bucket), " has not been registered"));
  }
  const Entry& entry = found->second;
  if (chunk < entry.plan.Count()) return &entry;
  return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(bucket), " has ",
                                                 entry.plan.Count(), " chunks, got chunk ", chunk));
}

absl::StatusOr<LayoutRegistry::Known> LayoutRegistry::Check(uint32_t node,
                                                            const Contribution& c) const {
  THALWEG_ASSIGN_OR_RETURN(const Entry* entry, Find(c.id.bucket, c.id.chunk));
  const WireFormat wire = entry->bucket.wire;
  const uint64_t elems = entry->plan.Elems(c.id.chunk);
  const uint64_t bytes = c.payload.SizeBytes();
  if (c.group != 0) {  // which would be complete without the other nodes
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket),
                     ": buckets are all nodes', but node ", node, " names group ", c.group));
  }
  if (!IsLossScale(c.loss_scale)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket),
        ": expected a positive, finite loss scale, or 0 for none, got ", c.loss_scale));
  }
  const bool pulls = c.collective == kPull;
  const bool updates = entry->rule != nullptr && entry->rule->commits == pulls;
  if ((c.settings != 0) != updates || (pulls && !updates)) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket),
                     updates ? " is updated, but the contribution names no settings"
                             : " has no update in this round, but the contribution names settings ",
                     updates ? "" : absl::StrCat(c.settings), pulls ? " and pulls" : ""));
  }
  if (c.wire == wire && c.elems == elems && HasRightSize(node, c)) {
    return Known{entry->UpdateOf(c.id.chunk), entry->WeightOf(c.elems)};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("chunk ", c.id.chunk, " of bucket ", ToString(c.id.bucket), ": expected ", elems,
                   " elements in ", Name(wire), ", ", HasFixedSize(wire) ? "" : "at most ",
                   MaxEncodedBytes(wire, elems), " bytes, got ", c.elems, " in ", Name(c.wire),
                   ", ", bytes, " bytes"));
}

LayoutRegistry::Weight LayoutRegistry::Entry::WeightOf(uint64_t elems) const {
  // read from the plan: the layout would have to add up its tensors
  const uint64_t total = plan.total_elems;
  if (total == 0) return {{bucket.wire}, 0};
  const auto raw_bytes = static_cast<double>(bucket.raw_bytes);
  return {{bucket.wire, bucket.raw_bytes > total * SizeOf(bucket.layout.dtype)},
          raw_bytes * static_cast<double>(elems) / static_cast<double>(total)};
}

LayoutRegistry::Weight LayoutRegistry::WeightOf(BucketId id, uint64_t elems) const {
  const auto found = entries_.find({id.index, id.part});
  return found == entries_.end() ? Weight() : found->second.WeightOf(elems);
}

absl::StatusOr<uint64_t> LayoutRegistry::ResidualElems(BucketId bucket, uint32_t chunk) const {
  THALWEG_ASSIGN_OR_RETURN(const Entry* entry, Find(bucket, chunk));
  if (HasResidual(entry->bucket.wire)) return entry->plan.Elems(chunk);
  return absl::InvalidArgumentError(absl::StrCat("bucket ", ToString(bucket), " is sent in ",
                                                 Name(entry->bucket.wire),
                                                 ", which leaves no residual"));
}

uint64_t LayoutRegistry::BytesPerElem(const BucketAnnouncement& bucket) const {
  uint64_t floats = HasResidual(bucket.wire) ? 1 : 0;
  if (bucket.update) {
    floats += 1 + MaxMomentsOf(bucket.update->optimizer);
    if (bucket.update->commits) ++floats;              // the mean that waits
    if (bucket.update->sends_differences()) ++floats;  // the weights that nodes have
    // What nodes contribute before the slowest of them.
    if (const uint64_t ahead = bucket.update->ahead; ahead > 0) floats += (ahead + 1) * num_nodes_;
    if (bucket.update->quorum > 0) floats += num_nodes_;  // what comes late, until the next update
  }
  return floats * sizeof(float);
}

uint64_t LayoutRegistry::StateBytesOf(const BucketAnnouncement& bucket) const {
  return (bucket.layout.Elems() * BytesPerElem(bucket) + num_shards_ - 1) / num_shards_;
}

uint64_t LayoutRegistry::StateBytesPerElem(BucketId id) const {
  return BytesPerElem(entries_.at({id.index, id.part}).bucket);
}

LayoutRegistry::Update LayoutRegistry::Entry::UpdateOf(uint32_t chunk) const {
  if (rule == nullptr) return {};
  return {rule, pieces[chunk]};
}

LayoutRegistry::Update LayoutRegistry::UpdateOf(BucketId id, uint32_t chunk) const {
  return entries_.at({id.index, id.part}).UpdateOf(chunk);
}

absl::StatusOr<LayoutRegistry::WeightsSize> LayoutRegistry::SizeOfWeights(BucketId bucket,
                                                                          uint32_t chunk) const {
  THALWEG_ASSIGN_OR_RETURN(const Entry* entry, Find(bucket, chunk));
  if (entry->rule != nullptr) {
    return WeightsSize{entry->plan.Elems(chunk), MaxMomentsOf(entry->rule->optimizer)};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("bucket ", ToString(bucket), " has no update: shards keep no weights of it"));
}

bool LayoutRegistry::HasUpdated() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return entry.second.rule != nullptr; });
}

std::map<BucketId, std::string> LayoutRegistry::DescribeUpdated() const {
  std::map<BucketId, std::string> described;
  for (const auto& [key, entry] : entries_) {
    if (entry.rule == nullptr) continue;
    std::string& text = described[entry.bucket.id];
    text = absl::StrCat(ToString(*entry.rule), ", ", Name(entry.bucket.layout.dtype));
    const std::vector<TensorSpec>& tensors = entry.bucket.layout.tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      absl::StrAppend(&text, "\n", tensors[i].name, " [", absl::StrJoin(tensors[i].shape, ", "),
                      "] of group ", entry.rule->groups[i]);
    }
  }
  return described;
}

std::vector<ElemRange> LayoutRegistry::Padding(BucketId bucket, uint32_t chunk) const {
  const Entry& entry = entries_.at({bucket.index, bucket.part});
  const uint64_t begin = entry.plan.Begin(chunk);
  const uint64_t end = entry.plan.Begin(chunk + 1);
  std::vector<ElemRange> padding;
  for (const ElemRange& range : entry.padding) {
    const uint64_t first = std::max(begin, range.begin);
    const uint64_t last = std::min(end, range.end);
    if (first < last) padding.push_back({first - begin, last - begin});
  }
  return padding;
}

}  // namespace thalweg
