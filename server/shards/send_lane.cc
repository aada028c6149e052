#include "server/shards/send_lane.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/exchange/collective.h"

namespace thalweg {

namespace {

// Returns how many chunks a shard may lead by. Connections that have the same to carry share a link
// by themselves.
double LeadOf(const std::vector<uint32_t>& windows) {
  const double all = std::accumulate(windows.begin(), windows.end(), 0.0);
  const double largest = *std::max_element(windows.begin(), windows.end());
  const auto count = static_cast<double>(windows.size());
  const double alike = all / count / largest;  // 1: all are the same
  return std::max(all * std::max(0.5, alike * alike * alike), kLeastWindow * count);
}

}  // namespace

SendLane::SendLane(std::vector<uint32_t> windows, const std::vector<double>& shares,
                   std::span<Counter* const> wait_seconds)
    : windows_(std::move(windows)), lead_(LeadOf(windows_)), next_places_(windows_.size()) {
  const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (const double share : shares) steps_.push_back(all / share);
  for (Counter* const counter : wait_seconds) queues_.emplace_back(*counter);
}

bool SendLane::Push(uint32_t shard, Contribution contribution) {
  const double least = *std::max_element(next_places_.begin(), next_places_.end());
  const double place = std::max(next_places_[shard], OldestBut(shard).value_or(least));
  next_places_[shard] = place + steps_[shard];
  return queues_[shard].Push(std::move(contribution), place);
}

std::optional<double> SendLane::OldestBut(uint32_t shard) const {
  std::optional<double> oldest;
  for (uint32_t other = 0; other < queues_.size(); ++other) {
    const std::optional<double> place = queues_[other].oldest();
    if (other != shard && place) oldest = std::min(*place, oldest.value_or(*place));
  }
  return oldest;
}

bool SendLane::NoteAnswered(uint32_t shard) { return queues_[shard].NoteAnswered(); }

bool SendLane::IsAhead(uint32_t shard) const {
  const std::optional<double> next = queues_[shard].next();
  const std::optional<double> oldest = OldestBut(shard);
  return next && oldest && *next > *oldest + lead_;
}

std::optional<Contribution> SendLane::Next(uint32_t shard, TimePoint now) {
  return queues_[shard].Next(IsAhead(shard) ? 1 : windows_[shard], now);
}

std::deque<Contribution> SendLane::Close() {
  std::deque<Contribution> unsent;
  for (SendQueue& queue : queues_) std::ranges::move(queue.Close(), std::back_inserter(unsent));
  return unsent;
}

}  // namespace thalweg
