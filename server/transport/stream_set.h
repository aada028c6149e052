// The streams that a server has open.
#pragma once

#include <memory>
#include <set>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"

namespace thalweg {

class ServerStream;

// The streams that gRPC has not done with. Thread-safe.
class StreamSet {
 public:
  // Keeps the stream and sets it going; after Shutdown, ends it. False after Close: nothing may be
  // asked of gRPC any more.
  [[nodiscard]] bool Add(const std::shared_ptr<ServerStream>& stream);
  void Remove(const std::shared_ptr<ServerStream>& stream);
  // Ends the streams there are and those to come, for `why`.
  void Shutdown(const absl::Status& why);
  // Keeps no more streams.
  void Close();
  // True when no stream is left.
  bool WaitEmpty(TimePoint deadline);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<std::shared_ptr<ServerStream>> streams_ ABSL_GUARDED_BY(mutex_);
  absl::Status shut_down_ ABSL_GUARDED_BY(mutex_);  // not OK: why no stream is accepted any more
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
