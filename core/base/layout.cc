#include "core/base/layout.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/hash.h"
#include "core/base/protocol.h"

namespace thalweg {
namespace {

std::string Describe(const TensorSpec& t) {
  return absl::StrCat("'", t.name, "' [", absl::StrJoin(t.shape, ", "), "]");
}

// Returns the size of a chunk in this format as a multiple of a dense chunk's size.
uint64_t ChunkScale(WireFormat wire) {
  const auto lossy = FindLossy(wire);
  return lossy ? lossy->chunk_scale : 1;
}

}  // namespace

uint64_t TensorSpec::Elems() const {
  uint64_t elems = 1;
  for (int64_t dim : shape) elems *= static_cast<uint64_t>(dim);
  return elems;
}

std::string ToString(BucketId id) {
  std::vector<std::string> more;
  if (id.generation != 0) more.push_back(absl::StrCat("layout ", id.generation));
  if (id.part != 0) more.push_back(absl::StrCat("part ", id.part));
  return more.empty() ? absl::StrCat(id.index)
                      : absl::StrCat(id.index, " (", absl::StrJoin(more, ", "), ")");
}

uint64_t BucketLayout::Elems() const {
  uint64_t elems = 0;
  for (const TensorSpec& t : tensors) elems += t.Elems();
  return elems;
}

std::vector<ElemRange> BucketLayout::Padding() const {
  std::vector<ElemRange> padding;
  uint64_t begin = 0;
  for (const TensorSpec& t : tensors) {
    const uint64_t end = begin + t.Elems();
    if (t.name.empty()) padding.push_back({begin, end});
    begin = end;
  }
  return padding;
}

uint64_t BucketLayout::Fingerprint() const {
  Fnv1a hash;
  hash.Add(static_cast<uint64_t>(dtype));
  hash.Add(tensors.size());
  for (const TensorSpec& t : tensors) {
    hash.Add(t.name.size());
    hash.Add(t.name.data(), t.name.size());
    hash.Add(t.shape.size());
    for (int64_t dim : t.shape) hash.Add(static_cast<uint64_t>(dim));
  }
  return hash.hash();
}

absl::Status CheckSameLayout(BucketId id, const BucketLayout& a, const std::string& owner_a,
                             const BucketLayout& b, const std::string& owner_b) {
  if (a == b) return absl::OkStatus();
  const std::string head =
      absl::StrCat("bucket ", ToString(id), " differs between ", owner_a, " and ", owner_b, ": ");
  const char* advice = "; all workers must build the same model with parameters in the same order";
  if (a.dtype != b.dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat(head, "element type ", Name(a.dtype), " and ", Name(b.dtype), advice));
  }
  const size_t common = std::min(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < common; ++i) {
    if (a.tensors[i] != b.tensors[i]) {
      return absl::InvalidArgumentError(absl::StrCat(head, "tensor ", i, " is ",
                                                     Describe(a.tensors[i]), " and ",
                                                     Describe(b.tensors[i]), advice));
    }
  }
  const bool a_longer = a.tensors.size() > b.tensors.size();
  const TensorSpec& extra = a_longer ? a.tensors[common] : b.tensors[common];
  return absl::InvalidArgumentError(absl::StrCat(head, "tensor ", common, ", ", Describe(extra),
                                                 ", exists only on ", a_longer ? owner_a : owner_b,
                                                 advice));
}

ChunkPlan ChunkPlan::For(uint64_t total_elems, DType dtype, WireFormat wire, uint64_t chunk_bytes,
                         uint32_t num_shards) {
  constexpr uint64_t kChunksPerShard = 4;
  constexpr uint64_t kEdgeChunksPerShard = 2;
  constexpr uint64_t kEdgeFraction = 4;
  // bytes; in smaller chunks the work per chunk outweighs the gain
  constexpr uint64_t kSmallest = 16 << 10;
  if (const auto lossy = FindLossy(wire); lossy && lossy->chunk_elems > 0) {
    return {total_elems, lossy->chunk_elems};
  }
  const uint64_t scale = ChunkScale(wire);
  const uint64_t smallest = scale * kSmallest;
  // The unit in bytes is a cache line, or whole blocks of every lossy format.
  const uint64_t unit = scale == 1 ? 64 : kLossyUnitElems * sizeof(float);
  const uint64_t scaled = std::min(scale * chunk_bytes, kMaxChunkBytes) / unit * unit;
  const uint64_t largest = std::max(chunk_bytes, scaled);
  const auto aligned = [unit](uint64_t bytes) { return (bytes + unit - 1) / unit * unit; };
  const uint64_t size = SizeOf(dtype);
  const uint64_t share = total_elems / (kChunksPerShard * num_shards) * size;
  const uint64_t bytes = std::min(largest, std::max(smallest, aligned(share)));
  const uint64_t edge_bytes = std::min(bytes, std::max(smallest, aligned(bytes / kEdgeFraction)));
  ChunkPlan plan{total_elems, std::max<uint64_t>(1, bytes / size)};
  plan.edge_elems = std::max<uint64_t>(1, edge_bytes / size);
  const uint64_t edge_chunks = kEdgeChunksPerShard * num_shards;
  if (plan.edge_elems < plan.chunk_elems && total_elems >= 2 * edge_chunks * plan.edge_elems) {
    plan.edge_chunks = static_cast<uint32_t>(edge_chunks);
  }
  return plan;
}

ChunkPlan ChunkPlan::AtGranules(const BucketLayout& layout, uint64_t granule) const {
  std::vector<uint64_t> moved = {0};
  uint64_t first = 0;  // of the tensor
  auto tensor = layout.tensors.begin();
  for (uint32_t chunk = 1; chunk < Count(); ++chunk) {
    const uint64_t begin = Begin(chunk);
    for (; begin >= first + tensor->Elems(); ++tensor) first += tensor->Elems();
    const uint64_t at = first + (begin - first) / granule * granule;
    if (at > moved.back()) moved.push_back(at);
  }
  if (total_elems > 0) moved.push_back(total_elems);
  ChunkPlan plan = *this;
  plan.begins = std::make_shared<const std::vector<uint64_t>>(std::move(moved));
  return plan;
}

uint64_t ChunkPlan::LastEdge() const {
  // The result is a multiple, so that all chunks begin aligned and only the last is of odd size.
  return (total_elems - edge_chunks * edge_elems) / edge_elems * edge_elems;
}

uint32_t ChunkPlan::Count() const {
  if (begins != nullptr) return static_cast<uint32_t>(begins->size() - 1);
  const auto ceil = [](uint64_t a, uint64_t b) { return static_cast<uint32_t>((a + b - 1) / b); };
  if (edge_chunks == 0) return ceil(total_elems, chunk_elems);
  const uint64_t last_edge = LastEdge();
  return edge_chunks + ceil(last_edge - edge_chunks * edge_elems, chunk_elems) +
         ceil(total_elems - last_edge, edge_elems);
}

uint32_t ChunkPlan::ChunkOf(uint64_t elem) const {
  uint32_t low = 0;
  for (uint32_t high = Count(); high - low > 1;) {
    const uint32_t middle = low + (high - low) / 2;
    (Begin(middle) <= elem ? low : high) = middle;
  }
  return low;
}

uint64_t ChunkPlan::Begin(uint32_t chunk) const {
  if (begins != nullptr) return (*begins)[chunk];
  if (edge_chunks == 0) return std::min(total_elems, chunk * chunk_elems);
  if (chunk <= edge_chunks) return chunk * edge_elems;
  const uint64_t last_edge = LastEdge();
  const uint64_t inner = (chunk - edge_chunks) * chunk_elems;
  if (edge_chunks * edge_elems + inner < last_edge) return edge_chunks * edge_elems + inner;
  const auto num_inner = (last_edge - edge_chunks * edge_elems + chunk_elems - 1) / chunk_elems;
  return std::min(total_elems, last_edge + (chunk - edge_chunks - num_inner) * edge_elems);
}

}  // namespace thalweg
