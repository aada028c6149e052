// What tests of whole clusters get back from a worker's session.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/session.h"
#include "core/base/testing/test_patience.h"

namespace thalweg {

// An Outcome is the result of one Submit, as bytes.
using Outcome = absl::StatusOr<std::vector<std::byte>>;

inline std::future<Outcome> SubmitAsync(Session& session, BucketId id,
                                        std::span<const std::byte> gradient) {
  auto promise = std::make_shared<std::promise<Outcome>>();
  session.Submit(id, gradient, {}, [promise](absl::StatusOr<ReducedBucket> reduced) {
    if (!reduced.ok()) return promise->set_value(reduced.status());
    promise->set_value(std::vector<std::byte>(reduced->bytes.begin(), reduced->bytes.end()));
  });
  return promise->get_future();
}

// Waits with a bound, so that a hang becomes a failure.
template <typename T>
T Get(std::future<T>& future) {
  if (future.wait_for(kTestPatience) != std::future_status::ready) std::abort();
  return future.get();
}

}  // namespace thalweg
