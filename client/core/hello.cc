#include "client/core/hello.h"

#include "core/base/protocol.h"

namespace thalweg {
namespace {

uint64_t Millis(Duration duration) { return static_cast<uint64_t>(ToNanos(duration) / 1'000'000); }

}  // namespace

ipc::Hello MakeHello(const SessionOptions& o) {
  ipc::Hello hello;
  hello.ipc_version = kIpcVersion;
  hello.job = o.job;
  hello.rank = o.rank;
  hello.world_size = o.world_size;
  hello.node = o.node;
  hello.num_nodes = o.num_nodes;
  hello.node_name = o.node_name;
  hello.local_rank = o.local_rank;
  hello.local_size = o.local_size;
  hello.codec = o.codec;
  hello.chunk_bytes = o.chunk_bytes;
  hello.timeout_ms = Millis(o.timeout);
  hello.step_timeout_ms = Millis(StepTimeout(o));
  hello.shards = o.shards;
  hello.secret = o.secret;
  hello.min_nodes = o.min_nodes;
  hello.returns = o.reconnect > Duration::zero();
  hello.loss_grace_ms = Millis(o.loss_grace);
  return hello;
}

}  // namespace thalweg
