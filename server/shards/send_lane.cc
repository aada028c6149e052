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

SendLane::SendLane(const std::vector<uint32_t>& windows, const std::vector<double>& shares,
                   std::span<Counter* const> wait_seconds)
    : lead_(LeadOf(windows)) {
  const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (size_t k = 0; k < windows.size(); ++k) {
    queues_.push_back({windows[k], all / shares[k], wait_seconds[k]});
  }
}

bool SendLane::Push(uint32_t shard, Contribution contribution) {
  Queue& queue = queues_[shard];
  const double most = std::ranges::max_element(queues_, {}, &Queue::next_place)->next_place;
  const double place = std::max(queue.next_place, OldestBut(shard).value_or(most));
  queue.next_place = place + queue.step;
  queue.places.push_back(place);
  queue.waiting.push_back(std::move(contribution));
  return queue.BeginSending();
}

std::optional<double> SendLane::OldestBut(uint32_t shard) const {
  std::optional<double> oldest;
  for (uint32_t other = 0; other < queues_.size(); ++other) {
    const std::deque<double>& places = queues_[other].places;
    if (other == shard || places.empty()) continue;
    oldest = std::min(places.front(), oldest.value_or(places.front()));
  }
  return oldest;
}

bool SendLane::NoteAnswered(uint32_t shard) {
  Queue& queue = queues_[shard];
  if (queue.owed() > 0) queue.places.pop_front();
  return queue.BeginSending();
}

bool SendLane::IsAhead(uint32_t shard) const {
  const Queue& queue = queues_[shard];
  const std::optional<double> oldest = OldestBut(shard);
  return oldest && queue.places[queue.owed()] > *oldest + lead_;
}

std::optional<Contribution> SendLane::Next(uint32_t shard, TimePoint now) {
  Queue& queue = queues_[shard];
  if (queue.waiting.empty() || queue.owed() >= (IsAhead(shard) ? 1 : queue.window)) {
    if (!queue.waiting.empty() && !queue.full_since) queue.full_since = now;
    queue.is_sending = false;
    return std::nullopt;
  }
  if (queue.full_since) queue.wait_seconds->Add(ToSeconds(now - *queue.full_since));
  queue.full_since.reset();
  std::optional<Contribution> next = std::move(queue.waiting.front());
  queue.waiting.pop_front();
  return next;
}

std::deque<Contribution> SendLane::Close() {
  std::deque<Contribution> unsent;
  for (Queue& queue : queues_) {
    queue.full_since.reset();
    queue.places.resize(queue.owed());
    std::ranges::move(queue.waiting, std::back_inserter(unsent));
    queue.waiting.clear();
  }
  return unsent;
}

}  // namespace thalweg
