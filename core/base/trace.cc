#include "core/base/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/env.h"

namespace thalweg {
namespace {

// Returns the text as a JSON string. Other bytes are copied; whether they are UTF-8 is not checked.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&quoted, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&quoted, "\\u", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad4));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

// Formats nanoseconds in the unit of trace files.
std::string Micros(int64_t nanos) {
  return absl::StrCat(nanos / 1000, ".", absl::Dec(nanos % 1000, absl::kZeroPad3));
}
std::string Micros(TimePoint time) { return Micros(ToNanos(time.time_since_epoch())); }

std::string HostName() {
  char host[256] = {};
  return gethostname(host, sizeof host - 1) == 0 ? host : "unknown";
}

// A Moment holds both of the host's clocks, read at the same time, in nanoseconds.
struct Moment {
  int64_t steady = 0;
  int64_t wall = 0;
};

Moment ReadBothClocks() {
  Moment best;
  Duration shortest = Duration::max();
  // The wall clock is read between two readings of the steady clock; the thread may be interrupted
  // in between, but hardly every time.
  for (int i = 0; i < 5; ++i) {
    const TimePoint before = Now();
    const auto wall = std::chrono::system_clock::now().time_since_epoch();
    const Duration took = Now() - before;
    if (took >= shortest) continue;
    shortest = took;
    best = {ToNanos((before + took / 2).time_since_epoch()),
            std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count()};
  }
  return best;
}

// Returns the first lines: what a reader must know about the process before the first span.
std::string Header(const std::string& program, pid_t pid) {
  const Moment now = ReadBothClocks();
  const std::string host = HostName();
  std::string text = "[\n";
  absl::StrAppend(&text, R"({"ph":"M","name":"process_name","pid":)", pid, R"(,"args":{"name":)",
                  Quoted(absl::StrCat(program, " ", host, " ", pid)), "}},\n");
  absl::StrAppend(&text, R"({"ph":"M","name":"thalweg_process","pid":)", pid,
                  R"(,"args":{"program":)", Quoted(program), R"(,"version":)",
                  Quoted(THALWEG_VERSION), R"(,"host":)", Quoted(host), R"(,"pid":)", pid,
                  R"(,"clock":)", Quoted(ReadClock().clock), R"(,"steady_ns":)", now.steady,
                  R"(,"wall_ns":)", now.wall, "}},\n");
  return text;
}

std::string Arguments(const TraceSpan& span) {
  const TraceSubject& what = span.what;
  if (!what.collective.empty()) {
    return absl::StrCat("{", *span.origin, R"(,"collective":)", Quoted(what.collective),
                        what.chunk ? absl::StrCat(R"(,"shard":)", what.chunk->shard) : "",
                        R"(,"raw_bytes":)", what.raw_bytes, "}");
  }
  std::string text =
      absl::StrCat("{", *span.origin, R"(,"bucket":)", what.bucket.index, R"(,"layout":)",
                   what.bucket.generation, R"(,"part":)", what.bucket.part);
  if (what.round != 0) absl::StrAppend(&text, R"(,"round":)", what.round);
  if (what.chunk) {
    absl::StrAppend(&text, R"(,"chunk":)", what.chunk->number, R"(,"part_round":)",
                    what.chunk->round, R"(,"shard":)", what.chunk->shard);
  }
  absl::StrAppend(&text, R"(,"raw_bytes":)", what.raw_bytes);
  if (what.wire_bytes != 0) absl::StrAppend(&text, R"(,"wire_bytes":)", what.wire_bytes);
  if (!what.codec.empty()) absl::StrAppend(&text, R"(,"codec":)", Quoted(what.codec));
  if (what.last_node) absl::StrAppend(&text, R"(,"last_node":)", *what.last_node);
  if (what.version != 0) absl::StrAppend(&text, R"(,"version":)", what.version);
  if (!what.pushes.empty()) absl::StrAppend(&text, R"(,"pushes":)", Quoted(what.pushes));
  return text + "}";
}

absl::StatusOr<int> Create(const std::string& folder, const std::string& stem, std::string* path) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot trace to the folder '", folder, "': ", error.message()));
  }
  for (int number = 1;; ++number) {
    *path = absl::StrCat(folder, "/", stem, number == 1 ? "" : absl::StrCat("-", number), ".json");
    const int fd = open(path->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) return fd;
    if (errno == EEXIST) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("cannot trace to '", *path, "': ", std::strerror(errno)));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<TraceWriter>> TraceWriter::Open(const std::string& folder,
                                                               const std::string& program,
                                                               const Options& options) {
  const pid_t pid = getpid();
  std::string path;
  const auto fd =
      Create(folder, absl::StrCat("thalweg-", program, "-", HostName(), "-", pid), &path);
  if (!fd.ok()) return fd.status();
  std::unique_ptr<TraceWriter> writer(new TraceWriter(*fd, path, options));
  if (!writer->Write(Header(program, pid))) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot trace to '", path, "': ", std::strerror(errno)));
  }
  writer->thread_ = Thread("thw-trace", [raw = writer.get()] { raw->Run(); });
  return writer;
}

absl::StatusOr<std::unique_ptr<TraceWriter>> TraceWriter::FromEnv(const std::string& program) {
  const std::string folder = GetEnv("THALWEG_TRACE");
  if (folder.empty()) return nullptr;
  return Open(folder, program, {});
}

TraceWriter::TraceWriter(int fd, std::string path, const Options& options)
    : fd_(fd), path_(std::move(path)), options_(options), pid_(getpid()) {
  queue_.reserve(std::min<size_t>(options.queue_spans, 1024));
}

TraceWriter::~TraceWriter() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
  close(fd_);
}

void TraceWriter::Add(TraceSpan span) {
  MutexLock lock(mutex_);
  if (queue_.size() < options_.queue_spans) {
    queue_.push_back(std::move(span));
  } else {
    ++dropped_;
  }
}

void TraceWriter::AddOffset(ClockOffset offset) {
  MutexLock lock(mutex_);
  offsets_.push_back(std::move(offset));
}

bool TraceWriter::Flush(TimePoint deadline) {
  MutexLock lock(mutex_);
  const uint64_t wanted = ++flushes_wanted_;
  changed_.NotifyAll();
  return changed_.WaitUntil(mutex_, deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return flushes_done_ >= wanted;
  });
}

uint64_t TraceWriter::dropped() {
  MutexLock lock(mutex_);
  return dropped_;
}

void TraceWriter::Run() {
  std::vector<TraceSpan> spans;
  std::vector<ClockOffset> offsets;
  uint64_t dropped_before = 0;
  bool is_last = false;
  while (!is_last) {
    uint64_t dropped = 0;
    uint64_t flushes = 0;
    spans.clear();
    offsets.clear();
    {
      MutexLock lock(mutex_);
      // Adding a span does not wake this thread: that would cost more than the adding.
      changed_.WaitUntil(mutex_, Now() + options_.interval,
                         [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                           return closing_ || flushes_wanted_ > flushes_done_;
                         });
      is_last = closing_;
      flushes = flushes_wanted_;
      spans.swap(queue_);
      offsets.swap(offsets_);
      dropped = dropped_;
    }
    std::string text;
    for (const ClockOffset& offset : offsets) text += Format(offset);
    if (dropped != dropped_before) {
      absl::StrAppend(&text, R"({"ph":"M","name":"thalweg_dropped","pid":)", pid_,
                      R"(,"args":{"spans":)", dropped, "}},\n");
      dropped_before = dropped;
    }
    // Lines about the quality of the trace are written even when the file is full.
    Write(text);
    const bool fits = WriteSpans(spans);
    MutexLock lock(mutex_);
    if (!fits) dropped_ += spans.size();
    is_last = is_last && dropped_ == dropped_before;  // otherwise write once more, to report it
    flushes_done_ = flushes;
    changed_.NotifyAll();
  }
}

bool TraceWriter::WriteSpans(const std::vector<TraceSpan>& spans) {
  std::string text;
  for (const TraceSpan& span : spans) text += Format(span);
  is_full_ = is_full_ || bytes_ + text.size() > options_.max_bytes;
  return !is_full_ && Write(text);
}

std::string TraceWriter::Format(const TraceSpan& span) {
  std::string text;
  if (span.kind == TraceSpan::Kind::kWork && named_threads_.insert(span.thread).second) {
    std::string name;
    std::ifstream comm(absl::StrCat("/proc/self/task/", span.thread, "/comm"));
    if (std::getline(comm, name)) {
      absl::StrAppend(&text, R"({"ph":"M","name":"thread_name","pid":)", pid_, R"(,"tid":)",
                      span.thread, R"(,"args":{"name":)", Quoted(name), "}},\n");
    }
  }
  const std::string common =
      absl::StrCat(R"("cat":")", span.side, R"(","name":")", span.phase, R"(","pid":)", pid_);
  if (span.kind == TraceSpan::Kind::kWork) {
    absl::StrAppend(&text, R"({"ph":"X",)", common, R"(,"tid":)", span.thread, R"(,"ts":)",
                    Micros(span.begin), R"(,"dur":)", Micros(ToNanos(span.end - span.begin)),
                    R"(,"args":)", Arguments(span), "},\n");
    return text;
  }
  const std::string id = absl::StrCat(R"(,"id2":{"local":")", ++waits_, R"("})");
  absl::StrAppend(&text, R"({"ph":"b",)", common, id, R"(,"ts":)", Micros(span.begin),
                  R"(,"args":)", Arguments(span), "},\n");
  absl::StrAppend(&text, R"({"ph":"e",)", common, id, R"(,"ts":)", Micros(span.end), "},\n");
  return text;
}

std::string TraceWriter::Format(const ClockOffset& offset) const {
  return absl::StrCat(R"({"ph":"M","name":"thalweg_offset","pid":)", pid_, R"(,"args":{"at_ns":)",
                      offset.at, R"(,"clock":)", Quoted(offset.clock), R"(,"offset_ns":)",
                      offset.nanos, R"(,"error_ns":)", offset.error, "}},\n");
}

bool TraceWriter::Write(const std::string& text) {
  size_t done = 0;
  while (done < text.size() && !is_broken_) {
    const ssize_t n = write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      is_broken_ = true;
      std::fprintf(stderr, "thalweg: the trace ends, cannot write to %s: %s\n", path_.c_str(),
                   std::strerror(errno));
    } else {
      done += static_cast<size_t>(n);
    }
  }
  bytes_ += done;
  return done == text.size();
}

JobTrace::JobTrace(TraceWriter* writer, const char* side, const std::string& job, Place place)
    : writer_(writer), side_(side) {
  if (writer == nullptr) return;
  auto origin = std::make_shared<std::string>(absl::StrCat(R"("job":)", Quoted(job)));
  for (const auto& [name, value] : place) absl::StrAppend(origin.get(), ",\"", name, "\":", value);
  origin_ = std::move(origin);
}

void JobTrace::Work(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const {
  writer_->Add(
      {TraceSpan::Kind::kWork, side_, phase, gettid(), begin, end, origin_, std::move(what)});
}

void JobTrace::Wait(const char* phase, TimePoint begin, TimePoint end, TraceSubject what) const {
  writer_->Add({TraceSpan::Kind::kWait, side_, phase, 0, begin, end, origin_, std::move(what)});
}

}  // namespace thalweg
