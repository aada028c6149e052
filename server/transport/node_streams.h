// The streams of one membership on the aggregator's side. Together they are the node's NodeSink:
// what happens to one of them happens to the node.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "core/base/mutex.h"
#include "server/transport/frame_codec.h"
#include "server/transport/stream_counters.h"

namespace thalweg {

class ServerStream;

// Thread-safe. Kept by its streams, by the NodeTable while it has any, and by the shard as long as
// that likes. Calls neither the shard nor gRPC under its lock.
class NodeStreams final : public NodeSink, public std::enable_shared_from_this<NodeStreams> {
 public:
  NodeStreams(SessionToken token, uint32_t num_streams, Shard& shard, StreamCounters counters)
      : token_(token),
        num_streams_(num_streams),
        shard_(shard),
        counters_(counters),
        streams_(num_streams) {}

  SessionToken token() const { return token_; }

  // For the NodeTable. Takes the stream as number open.stream. InvalidArgument: the number of
  // streams differs from the first's. AlreadyExists: that stream is open.
  absl::Status Add(const OpenFrame& open, std::shared_ptr<ServerStream> stream);
  // For the NodeTable. gRPC has done with the stream; true when none is left.
  bool Remove(uint32_t index);

  // Makes the node known to the shard if stream `index` is its first, else waits until the first
  // has done that. The shard's refusal is that of all streams.
  absl::Status Begin(uint32_t index);
  absl::Status Contribute(uint32_t index, ChunkFrame chunk);
  // The peer broke the protocol or the shard refused: ends all streams with `why`, then the
  // membership. In this order the node reads this reason, and not the failure that its leaving
  // makes.
  void Refuse(const absl::Status& why);
  // Stream `index` cannot be read any more, because we have ended it with `end`, or else the peer
  // has: ends the membership, that stream with OK, and the rest. Whether the node has left in good
  // order, the shard knows.
  void Lost(uint32_t index, const absl::Status& end);

  void OnResult(RoundResult result) override;
  uint32_t Backlog() const override;
  void OnFailed(absl::Status why) override;

 private:
  // How the node has ended.
  struct End {
    absl::Status why;
    bool by_shard = false;  // `why` is the shard's, and travels as a failure frame
  };

  // Ends all streams, now and to come, unless the node has ended already.
  void EndAll(const End& end);
  static void EndOne(ServerStream& stream, const End& end);
  // True for the one that shall call Shard::Leave. To be asked before streams are ended: their ends
  // are reasons to leave, too, but not the first.
  bool BeginLeave();

  const SessionToken token_;
  const uint32_t num_streams_;
  Shard& shard_;
  const StreamCounters counters_;

  mutable Mutex mutex_;
  CondVar changed_;
  // Null: not open yet, or gRPC has done with it.
  std::vector<std::shared_ptr<ServerStream>> streams_ ABSL_GUARDED_BY(mutex_);
  bool attaching_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> attached_ ABSL_GUARDED_BY(mutex_);  // the shard's answer
  std::optional<End> end_ ABSL_GUARDED_BY(mutex_);
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
};

// The nodes that have streams, by their tokens. Thread-safe.
class NodeTable {
 public:
  // The references must outlive the table.
  NodeTable(Shard& shard, StreamCounters counters) : shard_(shard), counters_(counters) {}

  // The node that the stream belongs to; a new one for its first stream.
  absl::StatusOr<std::shared_ptr<NodeStreams>> Admit(const OpenFrame& open,
                                                     std::shared_ptr<ServerStream> stream);
  // gRPC has done with the stream.
  void Release(NodeStreams& node, uint32_t index);

  const StreamCounters& counters() const { return counters_; }

 private:
  Shard& shard_;
  const StreamCounters counters_;

  // Held over Add and Remove, so that no stream joins a node that is being forgotten.
  Mutex mutex_;
  std::map<SessionToken, std::shared_ptr<NodeStreams>> nodes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
