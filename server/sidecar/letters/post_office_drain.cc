// This file holds the part of PostOffice that lets a node leave when nobody needs it any more.
#include <algorithm>
#include <list>

#include "server/sidecar/letters/post_office.h"

namespace thalweg {
namespace {

constexpr Duration kSettleTime = std::chrono::seconds(2);

}  // namespace

void PostOffice::DismissLocked(const Offer& offer) {
  if (offer.local != nullptr || offer.body.SizeBytes() != offer.bytes) return;
  Correspondence& with = WithLocked(offer.node);
  if (with.other_has_given_up()) return;
  with.Write({.kind = LetterKind::kRequest, .message = offer.message, .offset = offer.bytes}, {});
}

size_t PostOffice::Drain(TimePoint deadline, const std::function<bool()>& has_ended) {
  size_t untaken = 0;
  const Duration for_settling = std::min<Duration>(kSettleTime, (deadline - Now()) / 10);
  std::list<Offer> offers;  // they tell workers of their end: without the lock
  {
    MutexLock lock(mutex_);
    is_draining_ = true;
    for (auto& [to, mailbox] : mailboxes_) {
      std::list<Offer> taken = mailbox.TakeOffers();
      for (const Offer& offer : taken) DismissLocked(offer);
      offers.splice(offers.end(), taken);
    }
  }
  offers.clear();
  Act();
  {
    MutexLock lock(mutex_);
    // What its worker has not waited for is not waited for here either.
    const auto num_untaken = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return static_cast<size_t>(std::count_if(
          sending_.begin(), sending_.end(), [](const auto& each) { return each.second->is_done; }));
    };
    const TimePoint last = deadline - for_settling;
    changed_.WaitUntil(mutex_, last, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return has_ended() || num_untaken() == 0;
    });
    untaken = num_untaken();
    for (auto& [node, with] : with_) {
      with.Settle(untaken > 0);
      WithLocked(node);
    }
  }
  Act();
  MutexLock lock(mutex_);
  // A node that has left confirms nothing any more.
  deadline = std::min(deadline, Now() + kSettleTime);
  changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return has_ended() || std::all_of(with_.begin(), with_.end(),
                                      [](const auto& each) { return each.second.is_settled(); });
  });
  return untaken;
}

}  // namespace thalweg
