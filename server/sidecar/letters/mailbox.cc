#include "server/sidecar/letters/mailbox.h"

#include <algorithm>
#include <utility>

namespace thalweg {

std::shared_ptr<Receiving> Mailbox::Put(Offer offer) {
  const auto fits = std::find_if(receives_.begin(), receives_.end(),
                                 [&](const auto& receive) { return receive->Takes(offer); });
  if (fits == receives_.end()) {
    offers_.push_back(std::move(offer));
    return nullptr;
  }
  std::shared_ptr<Receiving> receive = std::move(*fits);
  receives_.erase(fits);
  receive->offer = std::move(offer);
  return receive;
}

bool Mailbox::Ask(const std::shared_ptr<Receiving>& receive) {
  const auto fits = std::find_if(offers_.begin(), offers_.end(),
                                 [&](const Offer& offer) { return receive->Takes(offer); });
  if (fits == offers_.end()) {
    receives_.push_back(receive);
    return false;
  }
  receive->offer = std::move(*fits);
  offers_.erase(fits);
  return true;
}

}  // namespace thalweg
