// ShardStreams holds the node's ends of one membership's Exchange streams to one aggregator shard.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/job_signer.h"
#include "core/base/mutex.h"
#include "core/exchange/events.h"
#include "grpcpp/grpcpp.h"
#include "server/transport/node/client_stream.h"
#include "server/transport/received_frames.h"
#include "server/transport/sent_frames.h"
#include "server/transport/stream_counters.h"
#include "server/transport/wire/frame_codec.h"
#include "server/transport/wire/session_token.h"

namespace thalweg {

// A ShardStreams is thread-safe. A stream that breaks is opened again, for as long as the grace
// says. When one ends for another reason, or for good, all end. The object keeps itself alive until
// WaitDone has returned true. Its user must call WaitDone: otherwise the polling thread could drop
// the last reference, and would have to join itself.
class ShardStreams {
 public:
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    grpc::CompletionQueue* queue = nullptr;  // must outlive the streams
  };
  // A Ticket is a membership, and what proves to the shard that it is ours.
  struct Ticket {
    SessionToken token = 0;
    std::string identity = {};
    std::shared_ptr<const JobSigner> signer = nullptr;  // null: nothing proves the identity
  };
  struct Options {
    std::vector<Connection> connections;  // one at least
    std::string peer;                     // names the shard in errors
    Ticket ticket;
    Duration grace{};  // how long a broken stream may stay so; 0: not at all
  };
  // Opens a stream of the membership on each connection. The counters must outlive the streams,
  // that is until WaitDone has returned true.
  static std::shared_ptr<ShardStreams> Open(Options options, std::shared_ptr<MemberEvents> events,
                                            StreamCounters counters);

  // Queues a contribution, or a result that the shard wants, on its chunk's stream, or returns why
  // the streams have failed. Sets the header's acknowledgement.
  absl::Status Send(ChunkHeader header, const Payload& payload);

  // Stops all events from now on.
  void Detach();
  // Ends the streams with success; queued contributions are dropped. Requires Detach.
  void Finish();
  // Ends the streams at once.
  void Cancel();
  // Waits until gRPC has completed the streams; returns false at the deadline. Must not run on
  // gRPC's threads.
  bool WaitDone(TimePoint deadline);

  const StreamCounters& counters() const { return counters_; }

  // Passes on a frame that stream `index` has received; called by the streams.
  void Receive(uint32_t index, grpc::ByteBuffer&& bytes);
  // Is called by each stream as its last call, when gRPC has completed it.
  void StreamDone(uint32_t index, const grpc::Status& status);

 private:
  // Done outlives the streams, for the thread that sets it.
  struct Done {
    Mutex mutex;
    CondVar changed;
    size_t streams_left ABSL_GUARDED_BY(mutex) = 0;
  };

  // A Lane is one stream, all incarnations together.
  struct Lane {
    std::shared_ptr<ClientStream> stream;
    std::shared_ptr<ClientStream> broken;  // the one before, which may still be returning
    uint32_t incarnation = 0;
    bool is_live = true;  // otherwise frames wait in `sent` until the shard has resumed the stream
    SentFrames sent;      // empty without a grace
    ReceivedFrames received;
    TimePoint opened;        // when this incarnation was, or is to be
    TimePoint lost;          // when it broke
    std::string cause;       // and why
    bool is_asking = false;  // the stream fails where there is no connection, and says why
    std::string reason;      // what it said
  };

  ShardStreams(Options options, std::shared_ptr<MemberEvents> events, StreamCounters counters)
      : options_(std::move(options)),
        counters_(counters),
        lanes_(options_.connections.size()),
        events_(std::move(events)) {}

  bool is_resumable() const { return options_.grace > Duration::zero(); }
  // Returns a signed open frame.
  OpenFrame OpenFor(uint32_t index, const Lane& lane) const;
  absl::Status Handle(uint32_t index, grpc::ByteBuffer&& bytes);
  absl::Status HandleChunk(uint32_t index, ChunkFrame&& chunk);
  absl::Status HandleResumed(uint32_t index, const ResumedFrame& resumed);
  absl::Status HandleAcknowledged(uint32_t index, uint64_t received);
  // Opens the stream again if `status` says that it broke and there is time left.
  bool Reopen(uint32_t index, const grpc::Status& status);
  // Returns the status that the job gets when the stream has ended without the node having left.
  absl::Status LostStream(uint32_t index, const grpc::Status& status);
  // Reports the failure and ends all streams, unless that has happened or the node has left.
  void Fail(const absl::Status& why);
  // Returns the streams, none of which will be opened again.
  std::vector<std::shared_ptr<ClientStream>> Close();

  const Options options_;
  const StreamCounters counters_;

  // StreamDone shares this, because the streams may be destroyed while it runs.
  const std::shared_ptr<Done> done_ = std::make_shared<Done>();

  Mutex mutex_;
  std::vector<Lane> lanes_ ABSL_GUARDED_BY(mutex_);               // as many as connections
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;                // no frame counts any more
  std::shared_ptr<MemberEvents> events_ ABSL_GUARDED_BY(mutex_);  // null when calls must stop
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);                  // the status that they were told
  std::shared_ptr<ShardStreams> self_ ABSL_GUARDED_BY(mutex_);    // set until WaitDone
};

}  // namespace thalweg
