// The gradient of a bucket whose round runs, for its codecs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "server/sidecar/bucket/node_bucket.h"
#include "server/sidecar/bucket/round_report.h"
#include "server/sidecar/codec/gradient.h"
#include "server/sidecar/job/job_outcome.h"

namespace thalweg {

// InputTerms say how codecs wait for the workers' gradients. All must outlive the gradient.
struct InputTerms {
  const JobOutcome& outcome;  // ends the wait
  const RoundReport& report;
  Duration timeout;  // of one wait
  uint32_t local_size = 1;
  std::function<std::string(uint32_t)> rank_name;  // by local rank: "rank 3"
};

class ArenaGradient final : public Gradient {
 public:
  // Both must outlive it.
  ArenaGradient(NodeBucket& bucket, const InputTerms& terms)
      : Gradient(bucket.share()), bucket_(bucket), terms_(terms) {}

  absl::Status WaitFor(uint64_t end) override;
  std::vector<const void*> Shares(uint64_t begin) const override {
    return bucket_.memory().Shares(begin);
  }

  // Returns the time that all threads together have waited.
  Duration waited() const { return Duration(waited_.load()); }

 private:
  NodeBucket& bucket_;
  const InputTerms& terms_;
  std::atomic<Duration::rep> waited_{0};
};

}  // namespace thalweg
