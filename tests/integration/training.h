// Training runs jobs of several workers on generated gradients, round after round.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tests/integration/cluster.h"

namespace thalweg {

using Values = std::vector<float>;

// Results hold what every worker got: [rank][round][bucket].
using Results = std::vector<std::vector<std::vector<Values>>>;

// A step submits all buckets of `layouts`, then waits for all. Bucket b of generation g in round r
// holds gradient(rank, b, r).
class Training {
 public:
  using Source = std::function<Values(uint32_t rank, uint32_t bucket, uint64_t round)>;

  Training(Cluster& cluster, const CodecPolicy& codec,
           const std::shared_ptr<TraceWriter>& trace = nullptr)
      : sessions_(cluster.ConnectAll([&](SessionOptions& o) {
          o.codec = codec;
          o.trace = trace;
        })) {
    for (const auto& session : sessions_) EXPECT_TRUE(session.ok()) << session.status();
  }

  // Announces the buckets unless the generation is that of the previous run.
  Results Run(uint32_t generation, const std::vector<BucketLayout>& layouts, uint64_t rounds,
              const Source& source) {
    if (generation_ != generation) {
      for (const auto& session : sessions_) Announce(**session, generation, layouts);
    }
    generation_ = generation;
    Results results(sessions_.size());
    std::vector<std::future<void>> workers;
    for (uint32_t rank = 0; rank < sessions_.size(); ++rank) {
      workers.push_back(std::async(std::launch::async, [&, rank] {
        RunWorker(rank, generation, layouts, rounds, source, &results[rank]);
      }));
    }
    for (auto& worker : workers) Get(worker);
    return results;
  }

  Session& session(uint32_t rank) { return **sessions_[rank]; }

 private:
  static void Announce(Session& session, uint32_t generation,
                       const std::vector<BucketLayout>& layouts) {
    for (uint32_t b = 0; b < layouts.size(); ++b) {
      ASSERT_TRUE(session.RegisterBucket({b, generation}, layouts[b]).ok());
    }
  }
  void RunWorker(uint32_t rank, uint32_t generation, const std::vector<BucketLayout>& layouts,
                 uint64_t rounds, const Source& source, std::vector<std::vector<Values>>* results) {
    Session& session = **sessions_[rank];
    for (uint64_t round = 0; round < rounds; ++round) {
      std::vector<Values> gradients;
      std::vector<std::future<Outcome>> pending;
      for (uint32_t b = 0; b < layouts.size(); ++b) {
        gradients.push_back(source(rank, b, round));
        pending.push_back(
            SubmitAsync(session, {b, generation}, std::as_bytes(std::span(gradients.back()))));
      }
      results->emplace_back();
      for (auto& outcome : pending) {
        const Outcome bytes = Get(outcome);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        Values values(bytes->size() / sizeof(float));
        std::memcpy(values.data(), bytes->data(), bytes->size());
        results->back().push_back(std::move(values));
      }
    }
  }

  std::vector<absl::StatusOr<std::unique_ptr<Session>>> sessions_;
  std::optional<uint32_t> generation_;
};

}  // namespace thalweg
