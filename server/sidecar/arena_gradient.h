// The gradient of a NodeJob's bucket, for its codecs.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/base/clock.h"
#include "server/sidecar/codec/gradient.h"
#include "server/sidecar/node_job.h"

namespace thalweg {

class NodeJob::ArenaGradient final : public Gradient {
 public:
  // Both must outlive it.
  ArenaGradient(NodeJob& job, NodeBucket& bucket)
      : Gradient(bucket.share), job_(job), bucket_(bucket) {}

  absl::Status WaitFor(uint64_t end) override {
    const TimePoint start = Now();
    const ChunkPlan& plan = bucket_.dense->part().plan;
    const absl::Status status = job_.WaitInputs(bucket_, plan.ChunkOf(end - 1) + 1);
    waited_ += (Now() - start).count();
    return status;
  }
  std::vector<const void*> Shares(uint64_t begin) const override {
    return bucket_.memory->Shares(begin);
  }

  // By all threads together.
  Duration waited() const { return Duration(waited_.load()); }

 private:
  NodeJob& job_;
  NodeBucket& bucket_;
  std::atomic<Duration::rep> waited_{0};
};

}  // namespace thalweg
