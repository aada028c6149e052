// One bucket on one node: its memory, its codecs and its round.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/layout.h"
#include "core/base/update.h"
#include "core/ipc/message.h"
#include "server/sidecar/bucket/bucket_round.h"
#include "server/sidecar/bucket/bucket_terms.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/codec_memory.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/codec/part.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

// Thread-safe, except AddInput, which one thread at a time may call, and only before the round that
// needs the input. Beside the inputs, only round() changes. While a round runs, the contents of
// memory() belong to it: the job's threads read the shares and write disjoint pieces of the result.
class NodeBucket : public std::enable_shared_from_this<NodeBucket> {
 public:
  // Makes what a worker, `owner`, has announced. `auto_choice` is the number, among the policy's
  // codecs, of what auto has chosen for this bucket. `states` is the job's. InvalidArgument: shards
  // cannot update such a bucket, or the node's codecs or devices cannot take their weights.
  static absl::StatusOr<std::shared_ptr<NodeBucket>> Create(const ipc::RegisterBucket& announced,
                                                            const std::string& owner,
                                                            const BucketTerms& terms,
                                                            uint32_t auto_choice,
                                                            ParameterStates& states);

  BucketId id() const { return id_; }
  const BucketLayout& layout() const { return layout_; }
  const std::string& owner() const { return owner_; }  // who announced it first, "rank 3"
  DType share() const { return share_; }
  // Set where the shards keep the bucket's weights, which are then the results of its rounds.
  const std::optional<UpdateRule>& update() const { return whole_->part().bucket.update; }
  // Return the codec, and its part, that all those rounds go through.
  BucketCodec& updating() { return compressing_.empty() ? *whole_ : *compressing_.front(); }
  Part& updated_part() { return *updated_part_; }
  BucketMemory& memory() { return *memory_; }
  const BucketMemory& memory() const { return *memory_; }
  // Takes the whole bucket, as part 0, until all of compressing() have started.
  DenseCodec& whole() { return *whole_; }
  // Empty when the bucket is never compressed. Each tensor belongs to one of them.
  const std::vector<std::unique_ptr<BucketCodec>>& compressing() const { return compressing_; }
  // A part, and the codec that it belongs to; both are null where the bucket has no such part.
  struct OwnedPart {
    BucketCodec* codec = nullptr;
    Part* part = nullptr;
  };
  OwnedPart FindPart(uint32_t number) const {
    return number < kMaxParts ? parts_[number] : OwnedPart();
  }
  // Returns what another process needs of compressing(); null: nobody keeps that.
  CodecMemory* codec_memory() { return codec_memory_.get(); }
  // Goes on after `round`, which an earlier process has completed; `shards` sum the chunks. Before
  // the first round, and before codec_memory() is restored.
  void Restore(uint64_t round, std::vector<uint32_t> shards);
  // Takes the memory into which worker `local_rank` will put its share, in type share().
  absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& device_memory);

  BucketRound& round() { return round_; }
  const BucketRound& round() const { return round_; }
  // See BucketRound. InvalidArgument also: the worker's input has not been added, or the bucket's
  // update does not do that.
  absl::StatusOr<bool> Submit(uint32_t local_rank, const ipc::Submit& submission, TimePoint now);
  // Begins the round: it goes through compressing() once all of them have started, otherwise
  // through whole(). The caller then has memory() begin it, too.
  void BeginRound(double loss_scale);
  // Ends the round, after memory() has ended it.
  FinishedRound FinishRound(TimePoint now);
  // Returns the local ranks whose share of the round that runs is not there, or not whole.
  std::vector<uint32_t> UnfilledBy() const;
  // Returns how many chunks of the parts in flight are without a result, and how many there are.
  std::pair<uint32_t, uint32_t> Outstanding() const;

 private:
  NodeBucket(const ipc::RegisterBucket& announced, const std::string& owner,
             const BucketTerms& terms, DType share, std::unique_ptr<BucketMemory> memory);
  void IndexParts();
  absl::Status CheckUpdated(const BucketTerms& terms);
  absl::Status CheckDoes(const ipc::Submit& submission) const;

  const BucketId id_;
  const BucketLayout layout_;
  const std::string owner_;
  const DType share_;
  const uint32_t local_size_;
  const std::unique_ptr<BucketMemory> memory_;
  std::unique_ptr<DenseCodec> whole_;  // set by Create, as are the others
  std::vector<std::unique_ptr<BucketCodec>> compressing_;
  std::array<OwnedPart, kMaxParts> parts_;  // by number
  std::unique_ptr<CodecMemory> codec_memory_;
  Part* updated_part_ = nullptr;  // set with update()
  BucketRound round_;
};

}  // namespace thalweg
