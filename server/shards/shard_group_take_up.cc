// This file holds the part of ShardGroup that takes a job up after an earlier process of the node.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "server/shards/shard_group.h"

namespace thalweg {

absl::Status ShardGroup::TakeUp(
    JoinRequest request, const KeptPlaces& kept,
    const std::function<std::shared_ptr<MemberEvents>(uint32_t)>& events_of, TimePoint deadline) {
  const bool has_share =
      std::any_of(kept.shares.begin(), kept.shares.end(), [](uint32_t share) { return share > 0; });
  if (kept.terms.size() != size() || kept.shares.size() != size() || !has_share) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job had ", kept.terms.size(), " aggregator shards, there are ", size()));
  }
  std::vector<Placement> placements(kMaxParts, Placement(kept.shares));
  for (const KeptPlaces::Bucket& bucket : kept.buckets) {
    THALWEG_RETURN_IF_ERROR(
        placements[bucket.announcement.id.part].Restore(bucket.announcement.id, bucket.placed));
  }
  request.num_shards = size();
  request.stop = stop_.get_token();
  request.shard_rates.assign(size(), 0);
  std::vector<absl::Status> answers(size());
  const auto take_up = [&](uint32_t k) -> absl::Status {
    JoinRequest mine = request;
    mine.shard = k;
    if (k > 0) {  // as in Join
      mine.costs.clear();
      mine.shard_rates.clear();
    }
    THALWEG_ASSIGN_OR_RETURN(std::unique_ptr<Member> member,
                             shards_[k]->TakeUp(mine, SeatOf(k, kept), events_of(k), deadline));
    return SetMember(k, std::move(member));
  };
  {
    std::vector<Thread> threads;
    for (uint32_t k = 0; k < size(); ++k) {
      threads.emplace_back("shard-take-up", [&, k] { answers[k] = take_up(k); });
    }
  }
  for (const absl::Status& answer : answers) THALWEG_RETURN_IF_ERROR(answer);
  Open({kept.shares, {}}, kept.terms[0].window_chunks, std::move(placements));
  return absl::OkStatus();
}

KeptSeat ShardGroup::SeatOf(uint32_t k, const KeptPlaces& kept) {
  KeptSeat seat{kept.terms[k], {}, {}};
  for (const KeptPlaces::Bucket& bucket : kept.buckets) {
    seat.buckets.push_back(bucket.announcement);
    seat.buckets.back().placement = Placement::Fingerprint(bucket.placed.shards);
    for (const RoundResult& result : bucket.results) {
      if (bucket.placed.shards[result.id.chunk] != k) continue;
      seat.results.push_back(result);
      seat.results.back().epoch = seat.agreed.epoch;
    }
  }
  return seat;
}

}  // namespace thalweg
