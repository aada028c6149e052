// LayoutRegistry holds the layout of each bucket of a job as its nodes announced it. A mismatch is
// refused at registration with the tensor and both nodes named (promise 6).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/layout.h"
#include "core/exchange/rounds.h"
#include "server/round/update.h"

namespace thalweg {

// Thread-compatible.
class LayoutRegistry {
 public:
  // The layouts of a job take at most about this many bytes.
  static constexpr uint64_t kMaxBytes = 32 << 20;

  LayoutRegistry(uint64_t chunk_bytes, uint32_t num_shards, uint32_t num_nodes = 1)
      : chunk_bytes_(chunk_bytes), num_shards_(num_shards), num_nodes_(num_nodes) {}

  // Accepts an announcement from the node called `owner`. The first announcement of a generation
  // decides; later ones must equal it. Returns InvalidArgument that names both owners and the
  // tensor, FailedPrecondition when a later generation of this index is already in use, or
  // ResourceExhausted when the layouts would take more than kMaxBytes.
  absl::Status Register(const std::string& owner, const BucketAnnouncement& bucket);

  // Says whether a later layout of the bucket has been registered.
  bool IsReplaced(BucketId bucket) const;

  // A Kind says how a chunk is counted in statistics.
  struct Kind {
    WireFormat wire = WireFormat::kFloat32;
    bool factors = false;  // represents more than its own elements

    auto operator<=>(const Kind&) const = default;
  };
  struct Weight {
    Kind kind;
    double raw_bytes = 0;  // bytes of gradient
  };
  // What becomes of a chunk after its mean; `rule` is null if nothing does.
  struct Update {
    std::shared_ptr<const UpdateRule> rule;
    std::shared_ptr<const std::vector<UpdatePiece>> pieces;  // null without a rule
  };
  struct Known {
    Update update;
    Weight weight;
  };
  // Checks that a contribution of `node` is a chunk of a registered bucket with the right format
  // and size; returns what is known of that.
  absl::StatusOr<Known> Check(uint32_t node, const Contribution& contribution) const;
  // Return the parts of that for a chunk of a bucket; nothing where it is not registered.
  Weight WeightOf(BucketId bucket, uint64_t elems) const;
  Update UpdateOf(BucketId bucket, uint32_t chunk) const;

  // Returns how many elements the residual of a chunk has. Returns FailedPrecondition when no such
  // bucket is registered, InvalidArgument when it has no such chunk or its format has no residuals.
  absl::StatusOr<uint64_t> ResidualElems(BucketId bucket, uint32_t chunk) const;

  // Returns about how many bytes the layouts take.
  uint64_t bytes() const { return bytes_; }
  // Returns how many bytes the states (ChunkState) of all registered buckets will take on one of
  // the job's shards, if each of them sums as much as the others.
  uint64_t state_bytes() const { return state_bytes_; }
  // Returns how many bytes the state of a chunk of a registered bucket takes for each element.
  uint64_t StateBytesPerElem(BucketId bucket) const;

  // Returns how many elements the weights of a chunk have, and how many moments its optimizer may
  // keep. Returns FailedPrecondition when no such bucket is registered, InvalidArgument when it has
  // no such chunk or no update.
  struct WeightsSize {
    uint64_t elems = 0;
    uint32_t moments = 0;
  };
  absl::StatusOr<WeightsSize> SizeOfWeights(BucketId bucket, uint32_t chunk) const;

  // Says whether a registered bucket has an update.
  bool HasUpdated() const;
  // Returns what the weights of each registered bucket with an update are of, and how they are
  // updated, as text: whoever keeps weights for later compares it.
  std::map<BucketId, std::string> DescribeUpdated() const;

  // Returns the padding in a chunk of a registered bucket, counted from the chunk's begin.
  std::vector<ElemRange> Padding(BucketId bucket, uint32_t chunk) const;

 private:
  struct Entry {
    BucketAnnouncement bucket;
    std::string owner;
    ChunkPlan plan;
    std::vector<ElemRange> padding;
    std::shared_ptr<const UpdateRule> rule;                               // null: none
    std::vector<std::shared_ptr<const std::vector<UpdatePiece>>> pieces;  // by chunk

    Weight WeightOf(uint64_t elems) const;
    Update UpdateOf(uint32_t chunk) const;
  };

  // Returns the entry of the registered bucket that contains this chunk.
  absl::StatusOr<const Entry*> Find(BucketId bucket, uint32_t chunk) const;

  Entry MakeEntry(const std::string& owner, const BucketAnnouncement& bucket) const;
  // Return about how many bytes the bucket's entry takes, and the state of each of its elements.
  uint64_t BytesOf(const BucketAnnouncement& bucket) const;
  uint64_t BytesPerElem(const BucketAnnouncement& bucket) const;
  uint64_t StateBytesOf(const BucketAnnouncement& bucket) const;

  uint64_t chunk_bytes_;
  uint32_t num_shards_;
  uint32_t num_nodes_;
  uint64_t bytes_ = 0;                                      // of all entries
  uint64_t state_bytes_ = 0;                                // the same
  std::map<std::pair<uint32_t, uint32_t>, Entry> entries_;  // by bucket index and part
};

}  // namespace thalweg
