// One bucket on one node: its memory, its codecs and its round.
#pragma once

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
#include "core/base/mutex.h"
#include "core/base/update.h"
#include "core/exchange/rounds.h"
#include "core/ipc/message.h"
#include "server/sidecar/bucket_round.h"
#include "server/sidecar/bucket_terms.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"
#include "server/sidecar/device/device.h"
#include "server/sidecar/part.h"

namespace thalweg {

// Thread-safe, except AddInput, which one thread at a time may call, and only before the round that
// needs the input. Its mutex guards the round, and the parts and traffic of the codecs; it is never
// held while a device works. While a round runs, the contents of memory() belong to it: the job's
// threads read the shares and write disjoint pieces of the result.
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
  // Returns the codec whose part that is; null when the bucket has no such part.
  BucketCodec* FindCodec(uint32_t part);
  // Takes the memory into which worker `local_rank` will put its share, in type share().
  absl::Status AddInput(uint32_t local_rank, UniqueFd fd, const DeviceMemory& device_memory);

  // See BucketRound. InvalidArgument also: the worker's input has not been added.
  absl::StatusOr<bool> Submit(uint32_t local_rank, uint64_t round, TimePoint now);
  // Before Submit: these of the bucket's tensors took no part in the worker's backward pass.
  // InvalidArgument: there is no such tensor.
  absl::Status NoteUnused(const std::vector<uint32_t>& tensors);
  // Before Submit: what the round does with the weights that shards keep. InvalidArgument: workers
  // differ, or the bucket's update does not do that.
  absl::Status NoteUpdate(uint64_t settings, UpdateRound kind);
  // Begins the round, which must be queued: it goes through compressing() once all of them have
  // started, otherwise through whole(). Its gradients carry `loss_scale`. The caller then has
  // memory() begin it, too.
  void BeginRound(double loss_scale);
  // Returns the same, of the round that runs.
  double loss_scale() const;
  uint64_t settings() const;
  bool has_gradient() const;  // it takes one from the workers
  // Takes the result of a claimed chunk that has squares (Part::gives_squares).
  absl::Status TakeSquares(const Part& part, const RoundResult& received);
  // Returns which tensors took no part on any worker of the node, by number; empty: all took part.
  std::vector<bool> unused() const;
  // Returns the codecs that the round goes through. Requires that it runs.
  std::vector<BucketCodec*> CodecsInUse() const;
  void BeginPart(Part& part);
  void NoteSent(BucketCodec& codec, Part& part, uint32_t chunk, uint64_t bytes, Duration encoding,
                TimePoint now);
  // Claims the chunk of a result for decoding; returns when the chunk was sent. Errors as
  // Part::Claim.
  absl::StatusOr<TimePoint> Claim(Part& part, const RoundResult& received);
  // The claimed chunk has been decoded. Returns true when it was the part's last.
  bool FinishChunk(BucketCodec& codec, Part& part, const RoundResult& received, Duration decoding);
  bool FinishCodec(const Part& last);
  // Ends the round, after memory() has ended it.
  FinishedRound FinishRound(TimePoint now);
  void AddReduceTime(Duration time);
  void AddWaitTime(Duration time);
  bool in_flight() const;
  bool is_running() const;  // in flight, and begun
  // Returns the number of the round in flight, or of the last one.
  uint64_t round() const;
  // The struct says what the bucket waits for, and since when.
  struct Waiting {
    uint64_t round = 0;             // as round()
    std::vector<uint32_t> missing;  // local ranks that have not submitted the next round, while
                                    // others have
    TimePoint first_submit;
    bool is_running = false;
    TimePoint ready_since;
  };
  Waiting waiting() const;
  // Returns the local ranks whose share of the round that runs is not there, or not whole.
  std::vector<uint32_t> UnfilledBy() const;
  // Returns how many chunks of the parts in flight are without a result, and how many there are.
  std::pair<uint32_t, uint32_t> Outstanding();

 private:
  absl::Status CheckUpdated(const BucketTerms& terms);
  NodeBucket(BucketId id, const BucketLayout& layout, const std::string& owner,
             const BucketTerms& terms);
  const BucketId id_;
  const BucketLayout layout_;
  const std::string owner_;
  const DType share_;
  const uint32_t local_size_;
  std::unique_ptr<BucketMemory> memory_;  // set by Create, as are the codecs; outlives them
  std::unique_ptr<DenseCodec> whole_;
  std::vector<std::unique_ptr<BucketCodec>> compressing_;
  Part* updated_part_ = nullptr;  // set with update()

  mutable Mutex mutex_;
  BucketRound round_ ABSL_GUARDED_BY(mutex_);
  // How many workers have said of a tensor, for the round that gathers, that it is unused; by
  // number.
  std::vector<uint32_t> num_unused_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> unused_ ABSL_GUARDED_BY(mutex_);  // in the round that runs
  // A Doing is what a round does; `next_` is that of the round that gathers, once a worker has said
  // so, and `now_` that of the round that runs.
  struct Doing {
    uint64_t settings = 0;
    UpdateRound kind = UpdateRound::kPush;
    bool operator==(const Doing&) const = default;
  };
  std::optional<Doing> next_ ABSL_GUARDED_BY(mutex_);
  Doing now_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> squares_ ABSL_GUARDED_BY(mutex_);  // as in Complete, of the round that runs
};

}  // namespace thalweg
