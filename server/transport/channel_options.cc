#include "server/transport/channel_options.h"

#include <grpc/compression.h>

#include <string>
#include <utility>
#include <vector>

#include "server/transport/wire/frame_codec.h"

namespace thalweg {
namespace {

using Arguments = std::vector<std::pair<std::string, int>>;

// The keepalive notices within 15 s that a peer's machine or network is gone. Pings overtake queued
// data, so a slow link does not look like a dead one.
constexpr int kKeepaliveMs = 10'000;

// Our headers have some hundred bytes; the keys and values of all of them count.
constexpr int kMaxHeaderBytes = 4096;
// A connection that does not get as far as HTTP/2 in this time is closed.
constexpr int kHandshakeTimeoutMs = 20'000;
// gRPC handles at most so much before it looks whether a connection still exists.
constexpr int kMaxReadBytes = 256 << 10;

const Arguments& CommonArguments() {
  static const Arguments arguments = {
      {GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs},
      {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs},
      {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
      {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
      // gRPC checks the length of a message before it inflates it, and not afterwards. Nothing is
      // sent compressed, because gradients have codecs of their own.
      {GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0},
  };
  return arguments;
}

}  // namespace

grpc::ChannelArguments ClientArguments() {
  grpc::ChannelArguments arguments;
  for (const auto& [name, value] : CommonArguments()) arguments.SetInt(name, value);
  // Without this option, all channels of a process to one address share a TCP connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(kMaxFrameBytes);
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  // Aggregators are inside the cluster, but gRPC would follow http_proxy by default.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // A shard that comes back may have another address behind its name. gRPC would ask for it only
  // once in 30 s.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  // gRPC does not repeat calls on its own and keeps no chunks for retries.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Nodes often start before the aggregator, so they reconnect soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  return arguments;
}

void ApplyServerArguments(grpc::ServerBuilder& builder, Duration idle) {
  for (const auto& [name, value] : CommonArguments()) builder.AddChannelArgument(name, value);
  // This interval is shorter than the clients' keepalive; otherwise the server would disconnect
  // them for pinging too often.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kKeepaliveMs / 2);
  builder.SetMaxReceiveMessageSize(kMaxFrameBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaderBytes);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             static_cast<int>(ToNanos(idle) / 1'000'000));
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kMaxReadBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsOfConnection);
  // Calls that announce compressed messages are refused.
  for (int algorithm = GRPC_COMPRESS_NONE + 1; algorithm < GRPC_COMPRESS_ALGORITHMS_COUNT;
       ++algorithm) {
    builder.SetCompressionAlgorithmSupportStatus(static_cast<grpc_compression_algorithm>(algorithm),
                                                 false);
  }
}

std::chrono::system_clock::time_point ToSystemTime(TimePoint deadline) {
  using std::chrono::system_clock;
  return system_clock::now() +
         std::chrono::duration_cast<system_clock::duration>(Remaining(deadline, Now()));
}

}  // namespace thalweg
