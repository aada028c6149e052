// An update is what a shard does with the mean of a bucket's gradients where it keeps the weights:
// a step of an optimizer, whose new weights are the round's result in the mean's place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/base/layout.h"
#include "core/base/weights.h"
#include "core/base/wire_format.h"

namespace thalweg {

// A job has at most this many groups of parameters.
inline constexpr uint32_t kMaxUpdateGroups = 4096;
// A rule lets nodes be at most this many rounds apart.
inline constexpr uint32_t kMaxAhead = 64;
// An UpdateRule::grace_ms that follows what has been measured of the nodes.
inline constexpr uint32_t kMeasuredGrace = UINT32_MAX;

enum class Optimizer : uint8_t { kSgd = 1, kAdam = 2, kLamb = 3 };

// The squares of gradients are summed by granule: so many elements of a tensor, counted from its
// first. A bucket's chunks end at granules where it has an update, so that the sums do not depend
// on how the bucket is cut.
inline constexpr uint64_t kUpdateGranule = 4096;

// An UpdateRule is what stays for as long as the bucket is registered: all nodes announce the same.
struct UpdateRule {
  Optimizer optimizer = Optimizer::kSgd;
  bool decoupled = false;  // weight decay as in AdamW; not of kSgd
  bool nesterov = false;   // of kSgd
  bool maximize = false;
  // Where something has to be known of all gradients before any update, an update takes two rounds:
  // one that gives the squares of the mean, and, when all nodes have decided, a pull. LAMB's does,
  // and takes another one between them.
  bool commits = false;
  // By tensor of the bucket: the number of its group of parameters, from 0 without gaps in a job.
  std::vector<uint32_t> groups;
  // Weights come in floats of 16 or 32 bits, or in blocks as differences from what nodes have.
  WireFormat down = WireFormat::kFloat32;  // differences begin with all weights in fp32
  // Updates have the mean of all nodes, but a node's result waits only for the round that is this
  // much older than its own, and has the weights of the moment.
  uint32_t ahead = 0;
  bool alone = false;  // each contribution is an update, whose result goes to its node alone
  // The learning rate is divided by the staleness of an `alone` contribution, if that is above 1.
  bool delay_aware = false;
  // Nodes train by themselves, and number their rounds so. An update has the mean of what is there
  // when all have contributed, or so many nodes and a grace is over that the others have; 0: of the
  // contributions to one round. Who comes later gets the weights of the moment, and what it gives
  // counts in the next update, or not at all.
  uint32_t quorum = 0;
  uint32_t grace_ms = 0;
  bool drops_late = false;
  bool operator==(const UpdateRule&) const = default;
  // Whether each node has rounds of its own, which it numbers by itself.
  bool has_own_rounds() const { return alone || quorum > 0; }
  // Whether a node may be answered before its contribution is folded.
  bool answers_early() const { return ahead > 0 || quorum > 0; }
  bool sends_differences() const { return !IsDense(down); }
};

// An UpdateRound is what a bucket's round does with the weights that shards keep.
enum class UpdateRound : uint8_t {
  kPush = 0,     // gives gradients, and gets new weights, or squares where the update commits
  kPull = 1,     // gets the new weights of an update that commits
  kMeasure = 2,  // of kLamb, before the pull: advances the moments, and gets two sums by granule,
                 // the squares of the weights and those of LAMB's update
};

// A GroupStep holds the settings of one group in one step, named as torch's optimizers name them.
struct GroupStep {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;   // of kSgd
  double dampening = 0;  // of kSgd
  double beta1 = 0;      // of kAdam and kLamb, as are the next two
  double beta2 = 0;
  double eps = 0;
  double trust_ratio = 1;  // of kLamb, where each tensor is a group of its own; may be no number

  // Ratios that are not numbers are equal.
  bool operator==(const GroupStep& other) const;
};

// An UpdateStep is announced by number, which contributions then name; all nodes give the same.
struct UpdateStep {
  std::vector<GroupStep> groups;  // all groups of the job
  // These are of rules that commit: what gradients carry and are divided by, the norm to which all
  // of them together are clipped (0: they are not), and the sum of their squares before the
  // division.
  double grad_scale = 1;
  double max_grad_norm = 0;
  double grad_squares = 0;  // not finite if a gradient is not
  bool measures = false;    // rounds with these settings are UpdateRound::kMeasure
  // With a quorum: the round waits for all nodes to have contributed with such settings, of which
  // those with the second give no values.
  bool waits_for_all = false;
  bool gives_nothing = false;

  // Squares that are not numbers are equal.
  bool operator==(const UpdateStep& other) const;
};

constexpr bool IsValid(Optimizer optimizer) {
  return optimizer == Optimizer::kSgd || optimizer == Optimizer::kAdam ||
         optimizer == Optimizer::kLamb;
}

constexpr bool IsValid(UpdateRound round) {
  return round == UpdateRound::kPush || round == UpdateRound::kPull ||
         round == UpdateRound::kMeasure;
}

// Returns the plan of a bucket with an update.
ChunkPlan PlanOfUpdated(const BucketLayout& layout, WireFormat wire, uint64_t chunk_bytes,
                        uint32_t num_shards);
// Returns how many granules elements [begin, end) have. A chunk of that plan has whole ones.
uint64_t GranulesIn(const BucketLayout& layout, uint64_t begin, uint64_t end);

// Return how many moments the optimizer keeps for each weight, with any settings, and in a step
// with these.
constexpr uint32_t MaxMomentsOf(Optimizer optimizer) {
  return optimizer == Optimizer::kSgd ? 1 : 2;
}
inline uint32_t MomentsOf(const UpdateRule& rule, const GroupStep& group) {
  return rule.optimizer != Optimizer::kSgd ? 2 : group.momentum != 0 ? 1 : 0;
}

// Check values that may come from outside. InvalidArgument says what cannot be: there is no such
// optimizer or it has no such option, weights do not come in the format `down`, the bucket has
// another number of tensors, a setting is not finite or out of torch's bounds for it, or there are
// too many groups.
absl::Status Validate(const UpdateRule& rule, const BucketLayout& layout);
absl::Status Validate(const UpdateStep& step);
// Also: the rule names a group that has no settings, or its options do not go with them. Requires
// that each is valid by itself.
absl::Status CheckFits(const UpdateStep& step, const UpdateRule& rule);

// Returns e.g. "adam (decoupled), weights in fp32, 2 groups".
std::string ToString(const UpdateRule& rule);

}  // namespace thalweg
