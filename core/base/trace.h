// TraceWriter records what a process does with every bucket, as spans of time, in a file that
// Perfetto and chrome://tracing open. `thalweg trace merge` joins it with the files of the job's
// other processes (docs/timeline.md).
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

// A TraceSubject names what a span is about.
struct TraceSubject {
  struct Chunk {
    uint32_t number = 0;
    uint64_t round = 0;  // of the part's chunk
    uint32_t shard = 0;
  };

  std::string collective = {};  // e.g. "allreduce 7 of group 'default'"; if given, only bytes count
  BucketId bucket = {};
  uint64_t round = 0;  // of the bucket; 0 when unknown
  std::optional<Chunk> chunk = {};
  uint64_t raw_bytes = 0;   // gradient bytes
  uint64_t wire_bytes = 0;  // 0 when nothing has been encoded
  std::string codec = {};
  std::optional<uint32_t> last_node = {};  // the node that the others have waited for
  uint64_t version = 0;                    // of weights that are updated; 0 when they are not
  std::string pushes =
      {};  // that such an update has, each as "node:round", if not all of one round
};

struct TraceSpan {
  enum class Kind : uint8_t {
    kWork,  // of one thread; nested in another span of that thread or disjoint from it
    kWait,  // between threads or processes; any number at once
  };

  Kind kind = Kind::kWork;
  const char* side = "";   // "worker", "sidecar", "shard"; this and the next are literals
  const char* phase = "";  // as in docs/timeline.md
  pid_t thread = 0;        // thread that works
  TimePoint begin;
  TimePoint end;
  std::shared_ptr<const std::string> origin;  // job and place, as JSON members
  TraceSubject what;
};

// A TraceWriter writes one file on a thread of its own. It is thread-safe; adding takes a short
// lock and never waits for the file. Every line is an event; what is written survives when the
// process is killed.
class TraceWriter {
 public:
  struct Options {
    size_t queue_spans = 1 << 16;    // limit of spans not yet written; further ones are dropped
    uint64_t max_bytes = 256 << 20;  // limit of the file's size; further spans are dropped
    Duration interval = std::chrono::milliseconds(50);  // time between two checks of the queue
  };

  // Makes `folder` and in it a new file, thalweg-`program`-HOST-PID.json; if that exists, -2, -3 …
  // is inserted before the dot.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> Open(const std::string& folder,
                                                           const std::string& program,
                                                           const Options& options);
  // Opens the writer that THALWEG_TRACE names; returns null when it is empty.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> FromEnv(const std::string& program);
  ~TraceWriter();  // writes the remaining spans

  void Add(TraceSpan span);
  void AddOffset(ClockOffset offset);
  // Waits until all added spans have been written or dropped; returns false at `deadline`.
  bool Flush(TimePoint deadline);
  // Returns how many spans have been dropped.
  uint64_t dropped();
  const std::string& path() const { return path_; }

 private:
  TraceWriter(int fd, std::string path, const Options& options);

  void Run();
  std::string Format(const TraceSpan& span);
  std::string Format(const ClockOffset& offset) const;
  // Both return false when the file cannot take the text.
  bool Write(const std::string& text);
  bool WriteSpans(const std::vector<TraceSpan>& spans);

  const int fd_;
  const std::string path_;
  const Options options_;
  const pid_t pid_;

  // Only the writing thread uses these.
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

  Thread thread_;  // declared last, because it uses everything above
};

// A JobTrace adds the spans of one job on one side. It is copyable. When nothing is traced it
// converts to false and must not be used.
class JobTrace {
 public:
  using Place = std::initializer_list<std::pair<const char*, uint64_t>>;

  JobTrace() = default;
  // `writer` must outlive the object; nothing is traced when it is null. `place` says where in the
  // job this is, such as {{"node", 3}}; `side` and the place's names are literals.
  JobTrace(TraceWriter* writer, const char* side, const std::string& job, Place place);

  explicit operator bool() const { return writer_ != nullptr; }
  // Adds a phase of the calling thread.
  void Work(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const;
  void Wait(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const;

 private:
  TraceWriter* writer_ = nullptr;
  const char* side_ = "";
  std::shared_ptr<const std::string> origin_;
};

}  // namespace thalweg
