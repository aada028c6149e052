#include "server/aggregator/job_places.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

// `what` are the things that places stand for.
absl::Status CheckPlaces(const FairQuota& places, const JoinRequest& first, uint64_t wanted,
                         const char* what) {
  if (places.MayTake(first.place, wanted)) return absl::OkStatus();
  std::string own;
  if (!first.place.empty()) {
    own = absl::StrCat(", ", places.taken_by(first.place), " of them for ", first.place,
                       ", and no address may have more than it leaves free");
  }
  return absl::ResourceExhaustedError(absl::StrCat("this aggregator has jobs of ", places.taken(),
                                                   " ", what, own, ", and at most ", places.count(),
                                                   ": it has no room for ", wanted, " more"));
}

}  // namespace

absl::Status JobPlaces::Check(const JoinRequest& first) const {
  absl::Status status = CheckPlaces(jobs_, first, 1, "names");
  if (status.ok()) status = CheckPlaces(nodes_, first, first.num_nodes, "nodes");
  if (status.ok()) status = CheckPlaces(shards_, first, first.num_shards, "shards");
  return status;
}

void JobPlaces::Take(const JoinRequest& first) {
  jobs_.Take(first.place, 1);
  nodes_.Take(first.place, first.num_nodes);
  shards_.Take(first.place, first.num_shards);
}

void JobPlaces::Return(const JoinRequest& first) {
  jobs_.Return(first.place, 1);
  nodes_.Return(first.place, first.num_nodes);
  shards_.Return(first.place, first.num_shards);
}

}  // namespace thalweg
