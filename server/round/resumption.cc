#include "server/round/resumption.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// A chunk takes about this much here and in the engine.
constexpr uint64_t kBytesOfGathered = 256;
// While nodes wait, each number is kept as it came and as it was read.
constexpr uint64_t kBytesOfNumber = 2 * sizeof(uint64_t);

std::string ChunkName(BucketId bucket, uint32_t chunk) {
  return absl::StrCat("chunk ", chunk, " of bucket ", ToString(bucket));
}

}  // namespace

absl::Status Resumption::Add(uint32_t node, const std::vector<BucketRounds>& completed) {
  size_t numbers = 0;
  for (const BucketRounds& bucket : completed) numbers += bucket.rounds.size() + 1;
  if (numbers > kMaxResumedChunks) {
    return absl::InvalidArgumentError(absl::StrCat("node ", node, " resumes with the rounds of ",
                                                   numbers, " chunks, expected at most ",
                                                   kMaxResumedChunks));
  }
  numbers_ += numbers;
  const BucketRounds* before = nullptr;
  for (const BucketRounds& each : completed) {
    const bool in_order = before == nullptr || before->bucket < each.bucket;
    before = &each;
    if (!in_order || each.bucket.part >= kMaxParts) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", node, " resumes with the rounds of bucket ", ToString(each.bucket),
                       ", which cannot be or is out of order"));
    }
    std::vector<Rounds>& chunks = gathered_[each.bucket];
    if (each.rounds.size() > chunks.size()) {
      num_gathered_ += each.rounds.size() - chunks.size();
      chunks.resize(each.rounds.size());
    }
    for (size_t chunk = 0; chunk < each.rounds.size(); ++chunk) {
      if (each.rounds[chunk] > 0) chunks[chunk].Add(node, each.rounds[chunk]);
    }
  }
  if (num_gathered_ <= kMaxResumedChunks) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the nodes resume with the rounds of ",
                                                 num_gathered_, " chunks, expected at most ",
                                                 kMaxResumedChunks));
}

void Resumption::Rounds::Add(uint32_t node, uint64_t round) {
  if (nodes++ == 0 || round < least) {
    least = round;
    least_node = node;
  }
  if (round > last) {
    last = round;
    holder = node;
    holders = 1;
  } else if (round == last) {
    holder = std::min(holder, node);
    ++holders;
  }
}

absl::Status Resumption::CheckApart(const ChunkKey& chunk, const Rounds& rounds,
                                    uint32_t num_nodes) {
  const uint64_t least = rounds.nodes < num_nodes ? 0 : rounds.least;
  if (rounds.last - least <= 1) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "node ", rounds.holder, " resumes with round ", rounds.last, " of ",
      ChunkName(chunk.first, chunk.second), ", ",
      least == 0 ? std::string("another node") : absl::StrCat("node ", rounds.least_node),
      " with round ", least,
      ": nodes are more than one round apart only where the shard keeps weights"));
}

absl::StatusOr<std::vector<RoundId>> Resumption::Settle(uint32_t num_nodes) {
  std::vector<RoundId> complete;
  const auto gathered = std::exchange(gathered_, {});
  num_gathered_ = 0;
  numbers_ = 0;
  for (auto it = gathered.begin(); it != gathered.end(); ++it) {
    const auto& [bucket, chunks] = *it;
    // Once a chunk of a layout has a result, no node lacks any of the layouts before.
    const auto later = gathered.lower_bound({bucket.index, bucket.generation + 1, 0});
    if (later != gathered.end() && later->first.index == bucket.index) continue;
    for (uint32_t chunk = 0; chunk < chunks.size(); ++chunk) {
      const Rounds& rounds = chunks[chunk];
      if (rounds.nodes == 0) continue;
      THALWEG_RETURN_IF_ERROR(CheckApart({bucket, chunk}, rounds, num_nodes));
      complete.push_back({bucket, chunk, rounds.last});
      if (rounds.holders == num_nodes) continue;
      missing_[{bucket, chunk}] = {rounds.last, rounds.holder, num_nodes - rounds.holders};
    }
  }
  num_settled_ = complete.size();
  return complete;
}

std::vector<BucketRounds> Resumption::WantedFrom(uint32_t node) const {
  std::vector<BucketRounds> wanted;
  for (const auto& [key, missing] : missing_) {
    if (missing.holder != node) continue;
    const auto& [bucket, chunk] = key;
    if (wanted.empty() || wanted.back().bucket != bucket) wanted.push_back({bucket, {}});
    wanted.back().rounds.resize(chunk + 1);
    wanted.back().rounds[chunk] = missing.round;
  }
  return wanted;
}

bool Resumption::Ask(uint32_t node, const RoundId& id, std::optional<RoundResult>* result) {
  const auto found = missing_.find({id.bucket, id.chunk});
  if (found == missing_.end()) return false;
  Missing& missing = found->second;
  if (missing.round != id.round) {
    // The round after it is complete, so that only lost nodes still lack it.
    if (missing.result && id.round > missing.round + 1) missing_.erase(found);
    return false;
  }
  if (std::find(missing.asked.begin(), missing.asked.end(), node) != missing.asked.end()) {
    return true;
  }
  missing.asked.push_back(node);
  *result = missing.result;
  if (missing.result && missing.asked.size() == missing.lacking) missing_.erase(found);
  return true;
}

absl::StatusOr<std::vector<uint32_t>> Resumption::Supply(uint32_t node, const RoundResult& result) {
  const RoundId& id = result.id;
  const auto found = missing_.find({id.bucket, id.chunk});
  if (found == missing_.end() || found->second.round != id.round || found->second.holder != node ||
      found->second.result) {
    return absl::FailedPreconditionError(
        absl::StrCat("node ", node, " supplies the result of round ", id.round, " of ",
                     ChunkName(id.bucket, id.chunk), ", which nobody wants of it"));
  }
  Missing& missing = found->second;
  std::vector<uint32_t> asked = missing.asked;
  missing.result = result;
  if (asked.size() == missing.lacking) missing_.erase(found);
  return asked;
}

absl::Status Resumption::CheckMayLose(uint32_t node) const {
  for (const auto& [key, missing] : missing_) {
    if (missing.holder != node || missing.result) continue;
    return absl::FailedPreconditionError(absl::StrCat("the result of round ", missing.round, " of ",
                                                      ChunkName(key.first, key.second),
                                                      ", which others lack, was to come from it"));
  }
  return absl::OkStatus();
}

uint64_t Resumption::bytes() const {
  return kBytesOfGathered * (num_gathered_ + num_settled_) + kBytesOfNumber * numbers_;
}

}  // namespace thalweg
