// A Mailbox matches what one worker of a group is sent with what it wants to receive.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "server/sidecar/letters/message.h"

namespace thalweg {

// A receive takes the first offer that it fits, and an offer the first such receive. Offers come in
// the order of each sender's sends. Thread-compatible.
class Mailbox {
 public:
  // Returns the receive that takes the offer. Without one, returns null and keeps the offer.
  std::shared_ptr<Receiving> Put(Offer offer);
  // Returns whether there was an offer, which then is the receive's. Otherwise keeps the receive.
  bool Ask(const std::shared_ptr<Receiving>& receive);
  // Gives up the offers that nobody has taken.
  std::list<Offer> TakeOffers() { return std::exchange(offers_, {}); }

 private:
  std::list<Offer> offers_;
  std::list<std::shared_ptr<Receiving>> receives_;
};

}  // namespace thalweg
