#include "server/shards/round_ledger.h"

#include "absl/strings/str_cat.h"

namespace thalweg {

void RoundLedger::NoteBucket(const BucketAnnouncement& bucket) {
  buckets_.insert_or_assign({bucket.id.index, bucket.id.part}, bucket);
}

void RoundLedger::NoteContribution(const Contribution& contribution) {
  if (IsLetter(contribution.id)) {
    has_letters_ = true;
    return;
  }
  if (IsOneShot(contribution.id)) {
    one_shots_.insert(contribution.id);
    return;
  }
  chunks_[{contribution.id.bucket, contribution.id.chunk}].unanswered = contribution;
}

void RoundLedger::NoteLast(const RoundResult& result) {
  chunks_[{result.id.bucket, result.id.chunk}].last = result;
  result_bytes_ += result.payload.SizeBytes();
}

bool RoundLedger::NoteResult(const RoundResult& result, Replaced* replaced) {
  if (IsLetter(result.id)) return has_letters_ = true;
  if (IsOneShot(result.id)) return one_shots_.erase(result.id) > 0;
  const auto found = chunks_.find({result.id.bucket, result.id.chunk});
  if (found == chunks_.end()) return false;
  Chunk& chunk = found->second;
  if (!chunk.unanswered || chunk.unanswered->id != result.id) return false;
  replaced->contribution.swap(chunk.unanswered);
  result_bytes_ += result.payload.SizeBytes();
  if (chunk.last) {
    result_bytes_ -= chunk.last->payload.SizeBytes();
    replaced->results.push_back(*std::move(chunk.last));
  } else {
    // All nodes have contributed in this layout, so none lacks a result of the one before.
    DropOlderLayouts(result.id.bucket, replaced);
  }
  chunk.last = result;
  return true;
}

void RoundLedger::DropOlderLayouts(BucketId bucket, Replaced* replaced) {
  auto it = chunks_.lower_bound({BucketId{bucket.index, 0, 0}, 0});
  while (it != chunks_.end() && it->first.first < BucketId{bucket.index, bucket.generation, 0}) {
    if (it->second.last) {
      result_bytes_ -= it->second.last->payload.SizeBytes();
      replaced->results.push_back(*std::move(it->second.last));
    }
    it = chunks_.erase(it);
  }
}

std::vector<BucketAnnouncement> RoundLedger::Buckets() const {
  std::vector<BucketAnnouncement> buckets;
  for (const auto& [key, bucket] : buckets_) buckets.push_back(bucket);
  return buckets;
}

std::vector<Contribution> RoundLedger::Unanswered() const {
  std::vector<Contribution> contributions;
  for (const auto& [key, chunk] : chunks_) {
    if (chunk.unanswered) contributions.push_back(*chunk.unanswered);
  }
  return contributions;
}

std::vector<BucketRounds> RoundLedger::Completed() const {
  std::vector<BucketRounds> completed;
  for (const auto& [key, state] : chunks_) {
    if (!state.last) continue;
    const auto& [bucket, chunk] = key;
    if (completed.empty() || completed.back().bucket != bucket) completed.push_back({bucket, {}});
    completed.back().rounds.resize(chunk + 1);
    completed.back().rounds[chunk] = state.last->id.round;
  }
  return completed;
}

absl::StatusOr<std::vector<RoundResult>> RoundLedger::Results(
    const std::vector<BucketRounds>& rounds) const {
  std::vector<RoundResult> results;
  for (const BucketRounds& each : rounds) {
    for (uint32_t chunk = 0; chunk < each.rounds.size(); ++chunk) {
      const uint64_t round = each.rounds[chunk];
      if (round == 0) continue;
      const auto found = chunks_.find({each.bucket, chunk});
      if (found == chunks_.end() || !found->second.last || found->second.last->id.round != round) {
        return absl::InvalidArgumentError(
            absl::StrCat("the shard wants the result of round ", round, " of chunk ", chunk,
                         " of bucket ", ToString(each.bucket), ", which this node does not have"));
      }
      results.push_back(*found->second.last);
    }
  }
  return results;
}

}  // namespace thalweg
