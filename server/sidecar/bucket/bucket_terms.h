// What all buckets of a job have in common on a node.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/clock.h"
#include "core/base/codec_policy.h"
#include "core/base/gradient_path.h"
#include "server/sidecar/device/device.h"

namespace thalweg {

struct BucketTerms {
  std::string job = {};
  CodecPolicy codec;
  uint64_t chunk_bytes = 0;
  uint32_t num_shards = 1;
  uint32_t num_nodes = 1;
  uint32_t local_size = 1;
  Device* device = nullptr;
  // How long a device may take for what is queued on it, and a shard to answer an announcement.
  Duration patience{};
  GradientPath path = GradientPath::kCpu;  // of the worker, if the node has one only
  bool keeps_codecs = false;  // a worker holds what another process needs of codecs (CodecMemory)
};

}  // namespace thalweg
