// One node's Exchange stream on the aggregator's side.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "core/base/mutex.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/write_queue.h"

namespace thalweg {

class ServerStream;

// The streams that gRPC has not done with. Thread-safe.
class StreamSet {
 public:
  // Keeps the stream and sets it going; after Shutdown, ends it.
  void Add(const std::shared_ptr<ServerStream>& stream);
  void Remove(const std::shared_ptr<ServerStream>& stream);
  // Ends the streams there are and those to come, for `why`.
  void Shutdown(const absl::Status& why);
  // True when no stream is left.
  bool WaitEmpty(TimePoint deadline);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<std::shared_ptr<ServerStream>> streams_ ABSL_GUARDED_BY(mutex_);
  absl::Status shut_down_ ABSL_GUARDED_BY(mutex_);  // not OK: why no stream is accepted any more
};

struct StreamCounters {
  Counter& sent;
  Counter& received;

  // thalweg_grpc_{sent,received}_payload_bytes_total with role `role`: "server" or "client".
  static StreamCounters In(MetricRegistry& metrics, const std::string& role);
};

// Thread-safe as a NodeSink. Kept by the StreamSet until gRPC has done with it, and by the shard as
// long as that likes: after the end, what it is told is dropped.
class ServerStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                           public NodeSink,
                           public std::enable_shared_from_this<ServerStream> {
 public:
  // All references must outlive gRPC's use of the stream.
  ServerStream(Shard& shard, StreamSet& streams, StreamCounters counters)
      : shard_(shard), streams_(streams), counters_(counters) {}

  // Begins to read. Call once, after the stream is in the set.
  void Start();
  // Finishes with `why` after what is queued has been sent. Only the first reason counts.
  void End(const absl::Status& why, WriteQueue::Pending pending = WriteQueue::Pending::kSend);

  void OnResult(RoundResult result) override;
  void OnFailed(absl::Status why) override;

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

  absl::Status Handle(const grpc::ByteBuffer& bytes);
  void Do(WriteQueue::Turn turn);

  Shard& shard_;
  StreamSet& streams_;
  const StreamCounters counters_;
  WriteQueue writes_;

  // Only for OnReadDone, which gRPC calls once at a time.
  grpc::ByteBuffer read_;
  SessionToken token_ = 0;
  bool attached_ = false;

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status finish_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
