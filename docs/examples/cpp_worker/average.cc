// average SOCKET JOB NODE NODES: takes part in a job as the only worker of its node, through the
// sidecar that listens on SOCKET, and prints what the job's workers have averaged in three rounds.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <span>
#include <string>

#include "client/core/session.h"

namespace {

absl::Status Run(const thalweg::SessionOptions& options) {
  // Waits until the workers of all nodes have connected, for at most options.timeout.
  absl::StatusOr<std::unique_ptr<thalweg::Session>> session = thalweg::Session::Connect(options);
  if (!session.ok()) return session.status();
  // All workers announce the same buckets, and give gradients for them in the same order.
  const thalweg::BucketId bucket{.index = 0};
  absl::Status status = (*session)->RegisterBucket(bucket, {.tensors = {{"weight", {2, 2}}}});
  if (!status.ok()) return status;
  for (int round = 1; round <= 3; ++round) {
    std::array<float, 4> gradient{};
    gradient.fill(static_cast<float>((options.node + 1) * round));
    const auto mean = (*session)->Reduce(bucket, std::as_bytes(std::span(gradient)));
    if (!mean.ok()) return mean.status();
    // The bytes belong to the session, and are valid until the bucket's next round.
    const auto* values = reinterpret_cast<const float*>(mean->bytes.data());
    std::cout << "round " << round << ": " << values[0] << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: average SOCKET JOB NODE NODES\n";
    return 2;
  }
  thalweg::SessionOptions options;
  options.sidecar_path = argv[1];
  options.job = argv[2];
  options.node = static_cast<uint32_t>(std::atoi(argv[3]));
  options.num_nodes = static_cast<uint32_t>(std::atoi(argv[4]));
  options.node_name = "node " + std::to_string(options.node);
  options.rank = options.node;  // one worker on each node
  options.world_size = options.num_nodes;
  const absl::Status status = Run(options);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
