#include "core/base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thalweg::trace_test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr Duration kNever = std::chrono::hours(1);

class TraceTest : public ::testing::Test {
 protected:
  TraceTest() {
    char dir[] = "/tmp/thalweg-trace-XXXXXX";
    folder_ = mkdtemp(dir);
  }
  ~TraceTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<TraceWriter> Open(const TraceWriter::Options& options = {}) {
    auto writer = TraceWriter::Open(folder_, "test", options);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  }
  static std::vector<std::string> Lines(const std::string& path) {
    std::vector<std::string> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  static std::vector<std::string> Lines(const std::string& path, const std::string& with) {
    std::vector<std::string> lines = Lines(path);
    std::erase_if(lines, [&](const auto& line) { return !absl::StrContains(line, with); });
    return lines;
  }
  static TraceSubject Subject(uint32_t chunk) {
    TraceSubject what;
    what.bucket = {3, 1, 2};
    what.round = 5;
    what.chunk = {chunk, 4, 1};
    what.raw_bytes = 4096;
    what.wire_bytes = 2048;
    what.codec = "fp16";
    return what;
  }
  static TimePoint At(int64_t nanos) { return TimePoint(std::chrono::nanoseconds(nanos)); }
  // Adds `count` spans of work.
  static void Add(TraceWriter& writer, uint32_t count) {
    const JobTrace trace(&writer, "sidecar", "job", {{"node", 1}});
    for (uint32_t i = 0; i < count; ++i) trace.Work("reduce", At(1000), At(2500), Subject(i));
  }

  std::string folder_;
};

TEST_F(TraceTest, WorkAndWaitsSayWhatWhereAndWhen) {
  auto writer = Open();
  const std::string path = writer->path();
  EXPECT_THAT(path, AllOf(StartsWith(folder_ + "/thalweg-test-"),
                          EndsWith(absl::StrCat("-", getpid(), ".json"))));
  const JobTrace trace(writer.get(), "shard", "a \"job\"\n", {{"node", 1}, {"num_nodes", 2}});
  trace.Work("fold", At(1'234'567'890'123), At(1'234'567'892'006), Subject(7));
  TraceSubject what = Subject(7);
  what.last_node = 1;
  trace.Wait("wait_for_slowest", At(5'000), At(6'001), what);
  writer.reset();

  const std::string args =
      R"("args":{"job":"a \"job\"\u000a","node":1,"num_nodes":2,"bucket":3,"layout":1,"part":2,)"
      R"("round":5,"chunk":7,"part_round":4,"shard":1,"raw_bytes":4096,"wire_bytes":2048,)"
      R"("codec":"fp16")";
  const auto work = Lines(path, R"("ph":"X")");
  ASSERT_EQ(work.size(), 1u);
  EXPECT_EQ(work[0],
            absl::StrCat(R"({"ph":"X","cat":"shard","name":"fold","pid":)", getpid(), R"(,"tid":)",
                         gettid(), R"(,"ts":1234567890.123,"dur":1.883,)", args, "}},"));
  const auto begin = Lines(path, R"("ph":"b")");
  const auto end = Lines(path, R"("ph":"e")");
  ASSERT_EQ(begin.size(), 1u);
  ASSERT_EQ(end.size(), 1u);
  EXPECT_THAT(begin[0], AllOf(HasSubstr(R"("name":"wait_for_slowest")"),
                              HasSubstr(R"("id2":{"local":"1"},"ts":5.000,)"),
                              HasSubstr(args + R"(,"last_node":1}})")));
  EXPECT_THAT(end[0], HasSubstr(R"("id2":{"local":"1"},"ts":6.001})"));
}

TEST_F(TraceTest, FileBeginsWithTheProcessAndItsClocks) {
  const std::string path = Open()->path();
  const auto lines = Lines(path);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0], "[");
  EXPECT_THAT(lines[1], HasSubstr(R"("name":"process_name")"));
  EXPECT_THAT(lines[2], AllOf(HasSubstr(R"("name":"thalweg_process")"),
                              HasSubstr(absl::StrCat(R"("pid":)", getpid())),
                              HasSubstr(absl::StrCat(R"("clock":")", ReadClock().clock))));
}

TEST_F(TraceTest, ThreadsAreNamedOnce) {
  auto writer = Open();
  const std::string path = writer->path();
  Thread("fold-1", [&] {
    Add(*writer, 3);
    EXPECT_TRUE(writer->Flush(Now() + kNever));  // the thread still exists
  }).Join();
  EXPECT_THAT(Lines(path, "thread_name"),
              ::testing::ElementsAre(HasSubstr(R"("args":{"name":"fold-1"})")));
}

TEST_F(TraceTest, SpansBeyondTheQueueAreDroppedAndCounted) {
  auto writer = Open({.queue_spans = 10, .interval = kNever});
  const std::string path = writer->path();
  Add(*writer, 25);
  EXPECT_EQ(writer->dropped(), 15u);
  writer.reset();
  EXPECT_EQ(Lines(path, R"("ph":"X")").size(), 10u);
  const auto dropped = Lines(path, "thalweg_dropped");
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_THAT(dropped[0], HasSubstr(R"("args":{"spans":15})"));
}

TEST_F(TraceTest, FileThatIsFullSaysWhatItLacks) {
  auto writer = Open({.max_bytes = 2000, .interval = kNever});
  const std::string path = writer->path();
  Add(*writer, 1);
  EXPECT_TRUE(writer->Flush(Now() + kNever));
  Add(*writer, 20);
  EXPECT_TRUE(writer->Flush(Now() + kNever));
  Add(*writer, 1);  // it would fit, but a trace must not have holes
  writer.reset();
  EXPECT_EQ(Lines(path, R"("ph":"X")").size(), 1u);
  EXPECT_THAT(Lines(path, "thalweg_dropped").back(), HasSubstr(R"("args":{"spans":21})"));
}

TEST_F(TraceTest, WhatWasWrittenStaysWhenTheProcessIsKilled) {
  const pid_t child = fork();
  if (child == 0) {
    auto writer = TraceWriter::Open(folder_, "killed", {.interval = kNever});
    if (!writer.ok()) _exit(1);
    Add(**writer, 100);
    if (!(*writer)->Flush(Now() + kNever)) _exit(2);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  std::string path;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) path = entry.path();
  EXPECT_THAT(path, HasSubstr(absl::StrCat("thalweg-killed-")));
  EXPECT_EQ(Lines(path, R"("ph":"X")").size(), 100u);
}

TEST_F(TraceTest, ManyThreadsLoseNothing) {
  constexpr uint32_t kSpans = 2000;
  auto writer = Open({.interval = std::chrono::milliseconds(1)});
  const std::string path = writer->path();
  {
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back("adder", [&] { Add(*writer, kSpans); });
  }
  EXPECT_EQ(writer->dropped(), 0u);
  writer.reset();
  EXPECT_EQ(Lines(path, R"("ph":"X")").size(), 4 * kSpans);
  EXPECT_TRUE(Lines(path, "thalweg_dropped").empty());
}

TEST_F(TraceTest, SecondWriterOfAProcessHasItsOwnFile) {
  const auto first = Open();
  const auto second = Open();
  EXPECT_NE(first->path(), second->path());
  EXPECT_THAT(second->path(), EndsWith("-2.json"));
}

TEST_F(TraceTest, FolderThatCannotBeMadeIsNamed) {
  std::ofstream(folder_ + "/file") << "";
  const auto writer = TraceWriter::Open(folder_ + "/file/below", "test", {});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(writer.status().message()), HasSubstr(folder_ + "/file/below"));
}

TEST_F(TraceTest, OffsetsOfOtherClocksAreWritten) {
  auto writer = Open();
  const std::string path = writer->path();
  writer->AddOffset({"their boot", 12, -34, 5});
  writer.reset();
  EXPECT_THAT(Lines(path, "thalweg_offset"),
              ::testing::ElementsAre(HasSubstr(
                  R"("args":{"at_ns":12,"clock":"their boot","offset_ns":-34,"error_ns":5}},)")));
}

TEST(JobTraceTest, WithoutAWriterItIsOff) {
  EXPECT_FALSE(JobTrace());
  EXPECT_FALSE(JobTrace(nullptr, "worker", "job", {{"rank", 0}}));
}

}  // namespace
}  // namespace thalweg::trace_test
