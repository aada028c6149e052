// StreamSet holds the open streams of a server.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "server/transport/guard/fair_semaphore.h"

namespace thalweg {

class ServerStream;

// A StreamSet holds the streams that gRPC has not completed. It is thread-safe.
class StreamSet {
 public:
  // Ends the connection of a peer, as gRPC names it.
  using EndPeer = std::function<void(const std::string& peer)>;
  // `end_peer` is called, with no lock held, when a connection has more streams than the server's
  // settings allow, which bind only those that acknowledge them. Null: nothing is done then.
  explicit StreamSet(EndPeer end_peer = nullptr) : end_peer_(std::move(end_peer)) {}

  // So many streams may be there that have not said for which node they are.
  static constexpr uint32_t kMaxUnopened = 2048;

  // Returns the place of a stream that has not, from a caller at `where`; null: there is none.
  std::shared_ptr<void> TakePlace(const std::string& where) { return unopened_.Take(where); }
  // Keeps the stream and starts it; after Shutdown, ends it instead. Returns false after Close,
  // when gRPC may not be called any more.
  [[nodiscard]] bool Add(const std::shared_ptr<ServerStream>& stream);
  void Remove(const std::shared_ptr<ServerStream>& stream);
  // Ends all streams, present and future, with `why`.
  void Shutdown(const absl::Status& why);
  // Cancels the streams that have been stalled since before `before`.
  void CutStalled(TimePoint before);
  // Makes Add refuse every further stream.
  void Close();
  // Waits until no stream is left; returns false at the deadline.
  bool WaitEmpty(TimePoint deadline);

 private:
  // A Peer is a connection.
  struct Peer {
    int streams = 0;
    bool is_ended = false;  // by us
  };

  const EndPeer end_peer_;
  FairSemaphore unopened_{kMaxUnopened};
  Mutex mutex_;
  CondVar changed_;
  std::set<std::shared_ptr<ServerStream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Peer> by_peer_ ABSL_GUARDED_BY(mutex_);  // those with streams
  absl::Status shut_down_ ABSL_GUARDED_BY(mutex_);  // OK, or why Add refuses streams
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace thalweg
