// What a process does with every bucket, as spans of time: a file that Perfetto and
// chrome://tracing open, and that `thalweg trace merge` joins with those of the job's other
// processes (docs/timeline.md).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/host_clock.h"
#include "core/base/layout.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"

namespace thalweg {

// What a span is about.
struct TraceSubject {
  struct Chunk {
    uint32_t number = 0;
    uint64_t round = 0;  // of the part
    uint32_t shard = 0;
  };

  BucketId bucket;
  uint64_t round = 0;  // of the bucket; 0: whoever traces does not know it
  std::optional<Chunk> chunk = {};
  uint64_t raw_bytes = 0;   // of gradient
  uint64_t wire_bytes = 0;  // 0: nothing has been encoded
  std::string codec = {};
  std::optional<uint32_t> last_node = {};  // for which the others have waited
};

struct TraceSpan {
  enum class Kind : uint8_t {
    kWork,  // of one thread, inside another span of that thread or beside it
    kWait,  // between threads or processes; any number at once
  };

  Kind kind = Kind::kWork;
  const char* side = "";   // "worker", "sidecar", "shard"; this and the next are literals
  const char* phase = "";  // as docs/timeline.md has them
  pid_t thread = 0;        // of work
  TimePoint begin;
  TimePoint end;
  std::shared_ptr<const std::string> origin;  // job and place, as JSON members
  TraceSubject what;
};

// Writes one file, on a thread of its own. Thread-safe; adding takes a short lock and never waits
// for the file. Every line is an event, and what has been written stays when the process is killed.
class TraceWriter {
 public:
  struct Options {
    size_t queue_spans = 1 << 16;    // that wait to be written; beyond them spans are dropped
    uint64_t max_bytes = 256 << 20;  // of the file; beyond them spans are dropped
    Duration interval = std::chrono::milliseconds(50);  // between two looks at the queue
  };

  // Makes `folder` and in it a new file, thalweg-`program`-HOST-PID.json; with -2, -3 … before the
  // dot when there is one.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> Open(const std::string& folder,
                                                           const std::string& program,
                                                           const Options& options);
  // As THALWEG_TRACE says; null when it is empty.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> FromEnv(const std::string& program);
  ~TraceWriter();  // writes what is left

  void Add(TraceSpan span);
  void AddOffset(ClockOffset offset);
  // Waits until what has been added is in the file, or dropped; false when `deadline` came first.
  bool Flush(TimePoint deadline);
  // Spans that are not in the file and never will be.
  uint64_t dropped();
  const std::string& path() const { return path_; }

 private:
  TraceWriter(int fd, std::string path, const Options& options);

  void Run();
  std::string Format(const TraceSpan& span);
  std::string Format(const ClockOffset& offset) const;
  // False when the file cannot take it, or them.
  bool Write(const std::string& text);
  bool WriteSpans(const std::vector<TraceSpan>& spans);

  const int fd_;
  const std::string path_;
  const Options options_;
  const pid_t pid_;

  // The writing thread's.
  uint64_t bytes_ = 0;
  uint64_t waits_ = 0;
  bool is_full_ = false;
  bool is_broken_ = false;
  std::set<pid_t> named_threads_;

  Mutex mutex_;
  CondVar changed_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<TraceSpan> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<ClockOffset> offsets_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t flushes_wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t flushes_done_ ABSL_GUARDED_BY(mutex_) = 0;

  Thread thread_;  // last: it uses everything above
};

// The spans of one job on one side. Copyable. When nothing is traced it is false, and must not be
// used.
class JobTrace {
 public:
  using Place = std::initializer_list<std::pair<const char*, uint64_t>>;

  JobTrace() = default;
  // `writer` must outlive it; null: nothing is traced. `place` says where in the job this is, such
  // as {{"node", 3}}; `side` and its names are literals.
  JobTrace(TraceWriter* writer, const char* side, const std::string& job, Place place);

  explicit operator bool() const { return writer_ != nullptr; }
  // A phase of the calling thread.
  void Work(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const;
  void Wait(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const;

 private:
  TraceWriter* writer_ = nullptr;
  const char* side_ = "";
  std::shared_ptr<const std::string> origin_;
};

}  // namespace thalweg
