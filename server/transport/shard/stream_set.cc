#include "server/transport/shard/stream_set.h"

#include <utility>
#include <vector>

#include "server/transport/channel_options.h"
#include "server/transport/shard/server_stream.h"

namespace thalweg {

bool StreamSet::Add(const std::shared_ptr<ServerStream>& stream) {
  absl::Status shut_down;
  bool is_too_many = false;
  {
    MutexLock lock(mutex_);
    if (closed_) return false;
    streams_.insert(stream);
    shut_down = shut_down_;
    Peer& peer = by_peer_[stream->peer()];
    // What has been read from it already goes on making streams.
    is_too_many = ++peer.streams > kMaxStreamsOfConnection && !std::exchange(peer.is_ended, true);
  }
  stream->Start();
  if (is_too_many && end_peer_ != nullptr) end_peer_(stream->peer());
  if (!shut_down.ok()) stream->End(shut_down);
  return true;
}

void StreamSet::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
}

void StreamSet::Remove(const std::shared_ptr<ServerStream>& stream) {
  MutexLock lock(mutex_);
  streams_.erase(stream);
  const auto peer = by_peer_.find(stream->peer());
  if (--peer->second.streams == 0) by_peer_.erase(peer);
  changed_.NotifyAll();
}

void StreamSet::Shutdown(const absl::Status& why) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  {
    MutexLock lock(mutex_);
    shut_down_ = why;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->End(why);
}

void StreamSet::CutStalled(TimePoint before) {
  std::vector<std::shared_ptr<ServerStream>> streams;
  {
    MutexLock lock(mutex_);
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->CutIfStalled(before);
}

bool StreamSet::WaitEmpty(TimePoint deadline) {
  MutexLock lock(mutex_);
  return changed_.WaitUntil(mutex_, deadline, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return streams_.empty();
  });
}

}  // namespace thalweg
