// These tests check what workers, sidecars and shards write about a job to their traces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "core/base/trace.h"
#include "server/base/outcome_counters.h"
#include "tests/integration/training.h"

namespace thalweg::tracing_test {
namespace {

constexpr uint64_t kRounds = 3;
// The first bucket has several chunks, the second one; their code paths differ.
const std::vector<BucketLayout> kLayouts = {{DType::kFloat32, {{"a", {100, 50}}}},
                                            {DType::kFloat32, {{"b", {3}}}}};

Values Ones(uint32_t /*rank*/, uint32_t bucket, uint64_t /*round*/) {
  return Values(kLayouts[bucket].Elems(), 1.0f);
}

class TracingTest : public ::testing::Test {
 protected:
  TracingTest() {
    char dir[] = "/tmp/thalweg-trace-XXXXXX";
    folder_ = mkdtemp(dir);
  }
  ~TracingTest() override { std::filesystem::remove_all(folder_); }

  // Trains, and returns how many spans of each phase there are. `chunk_rounds_` is the shards'
  // count.
  std::map<std::string, uint64_t> Spans(uint32_t nodes, uint32_t workers, const char* codec) {
    std::shared_ptr<TraceWriter> trace = *TraceWriter::Open(folder_, "test", {});
    {
      Cluster cluster(nodes, workers, 2, {}, 0, {}, trace.get());
      {
        Training training(cluster, *CodecPolicy::Parse(codec), trace);
        training.Run(0, kLayouts, kRounds, Ones);
      }
      const OutcomeCounters rounds(cluster.registry(), "thalweg_shard_rounds_total", "");
      chunk_rounds_ = static_cast<uint64_t>(rounds.Value(absl::StatusCode::kOk));
    }
    const std::string path = trace->path();
    trace.reset();
    std::map<std::string, uint64_t> spans;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      if (!absl::StrContains(line, R"("ph":"X")") && !absl::StrContains(line, R"("ph":"b")")) {
        continue;
      }
      const std::vector<std::string> words = absl::StrSplit(line, R"("name":")");
      ++spans[words.at(1).substr(0, words.at(1).find('"'))];
    }
    return spans;
  }

  uint64_t chunk_rounds_ = 0;

 private:
  std::string folder_;
};

TEST_F(TracingTest, EveryWorkerNodeAndShardHasAllPhasesOfEveryRound) {
  constexpr uint64_t kNodes = 2;
  constexpr uint64_t kBucketRounds = kRounds * 2;
  auto spans = Spans(kNodes, 2, "fp16");
  for (const char* phase : {"copy_in", "wait", "copy_out"}) {
    EXPECT_EQ(spans[phase], 2 * kNodes * kBucketRounds) << phase;
  }
  for (const char* phase : {"wait_workers", "exchange", "return"}) {
    EXPECT_EQ(spans[phase], kNodes * kBucketRounds) << phase;
  }
  ASSERT_GT(chunk_rounds_, kBucketRounds);
  for (const char* phase : {"reduce", "send", "wire", "decode"}) {
    EXPECT_EQ(spans[phase], kNodes * chunk_rounds_) << phase;
  }
  for (const char* phase : {"wait_for_slowest", "fold", "deliver"}) {
    EXPECT_EQ(spans[phase], chunk_rounds_) << phase;
  }
  EXPECT_EQ(spans["compress"], 0u);
}

TEST_F(TracingTest, StepsOfCompressionAreTraced) {
  constexpr uint64_t kNodes = 2;
  auto spans = Spans(kNodes, 1, "powersgd:rank=1,start=1");
  // Each of the two factors of the bucket that has a matrix, in all rounds but the first.
  EXPECT_GE(spans["compress"], 2 * kNodes * (kRounds - 1));
  for (const char* phase : {"reduce", "send", "wire", "decode"}) {
    EXPECT_EQ(spans[phase], kNodes * chunk_rounds_) << phase;
  }
  EXPECT_EQ(spans["exchange"], kNodes * kRounds * 2);
}

TEST_F(TracingTest, NodeAloneHasNothingOnTheWire) {
  auto spans = Spans(1, 2, "fp32");
  EXPECT_GT(spans["reduce"], kRounds * 2);
  EXPECT_EQ(spans["return"], kRounds * 2);
  for (const char* phase : {"send", "wire", "decode", "fold"}) EXPECT_EQ(spans[phase], 0u) << phase;
}

}  // namespace
}  // namespace thalweg::tracing_test
