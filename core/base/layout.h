// This header describes the contents of a gradient bucket and its division into chunks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/dtype.h"
#include "core/base/wire_format.h"

namespace thalweg {

struct TensorSpec {
  std::string name;            // the parameter's name in the model
  std::vector<int64_t> shape;  // in elements

  // Returns the product of `shape`; 1 for a scalar.
  uint64_t Elems() const;
  bool operator==(const TensorSpec&) const = default;
};

// DDP numbers its buckets from 0 and rebuilds them after the first iteration: `generation` counts
// the layouts that bucket `index` has had, from 0. `part` is 0 for the bucket itself; compression
// exchanges other vectors in its place (server/sidecar/codec/part.h), which are parts 1 …
// kMaxParts - 1.
struct BucketId {
  uint32_t index = 0;
  uint32_t generation = 0;
  uint32_t part = 0;

  auto operator<=>(const BucketId&) const = default;
};
inline constexpr uint32_t kMaxParts = 16;
// Returns "3", "3 (layout 1)", "3 (part 2)" or "3 (layout 1, part 2)".
std::string ToString(BucketId id);

// Elements from `begin` up to, but not including, `end`.
struct ElemRange {
  uint64_t begin = 0;
  uint64_t end = 0;

  bool operator==(const ElemRange&) const = default;
};

struct BucketLayout {
  DType dtype = DType::kFloat32;
  std::vector<TensorSpec> tensors;  // in the order of the bucket's memory

  uint64_t Elems() const;
  // Returns the tensors without a name: parts have them as padding between the others
  // (docs/codecs.md).
  std::vector<ElemRange> Padding() const;
  // Returns a 64-bit hash (FNV-1a) of element type, names, shapes and order: equal on all workers
  // that agree.
  uint64_t Fingerprint() const;
  bool operator==(const BucketLayout&) const = default;
};

// Returns OK when the layouts are equal; otherwise InvalidArgument that names the first tensor that
// differs and both owners, e.g. "rank 0" and "rank 3".
absl::Status CheckSameLayout(BucketId id, const BucketLayout& a, const std::string& owner_a,
                             const BucketLayout& b, const std::string& owner_b);

// A bucket is cut into chunks, which are reduced, encoded, sent and summed independently of each
// other. The first and the last `edge_chunks` chunks are smaller than the rest: the downlink is
// idle until the first result arrives, and the uplink after the last share is sent. The very last
// chunk may be shorter still.
struct ChunkPlan {
  uint64_t total_elems = 0;
  uint64_t chunk_elems = 1;
  uint32_t edge_chunks = 0;
  uint64_t edge_elems = 1;  // ≤ chunk_elems

  // Plans chunks of `chunk_bytes`, counted in the bucket's own element type. A small bucket gets
  // smaller chunks: each shard should have some, so that all links work and the first results
  // return while the last shares are in flight. In a lossy format chunks hold more elements, so
  // that as much crosses the wire: chunk_bytes is multiplied by LossyTraits::chunk_scale, up to
  // kMaxChunkBytes, or all chunks have LossyTraits::chunk_elems. All dense formats have the same
  // plan.
  static ChunkPlan For(uint64_t total_elems, DType dtype, WireFormat wire, uint64_t chunk_bytes,
                       uint32_t num_shards);

  // Returns the plan whose chunks begin at granules: where these begin, or up to a granule before.
  // A granule is `granule` elements of a tensor, counted from its first, or what is left of it.
  ChunkPlan AtGranules(const BucketLayout& layout, uint64_t granule) const;

  uint32_t Count() const;
  uint64_t Begin(uint32_t chunk) const;
  // Returns the chunk that contains element `elem` < total_elems.
  uint32_t ChunkOf(uint64_t elem) const;
  uint64_t Elems(uint32_t chunk) const { return Begin(chunk + 1) - Begin(chunk); }

  // Set by AtGranules: where each chunk begins, and the end of the last one.
  std::shared_ptr<const std::vector<uint64_t>> begins = nullptr;

 private:
  uint64_t LastEdge() const;  // first element of the small chunks at the end
};

}  // namespace thalweg
