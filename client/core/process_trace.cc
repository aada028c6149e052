#include "client/core/process_trace.h"

#include <unistd.h>

#include "core/base/mutex.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<std::shared_ptr<TraceWriter>> ProcessTrace() {
  struct Shared {
    Mutex mutex;
    // the owner: a forked child has a copy of the parent's writer, but not its thread
    pid_t pid = 0;
    std::weak_ptr<TraceWriter> writer;
  };
  static auto* const shared = new Shared();
  MutexLock lock(shared->mutex);
  std::shared_ptr<TraceWriter> writer = shared->writer.lock();
  if (writer != nullptr && shared->pid == getpid()) return writer;
  THALWEG_ASSIGN_OR_RETURN(writer, TraceWriter::FromEnv("worker"));
  shared->pid = getpid();
  shared->writer = writer;
  return writer;
}

}  // namespace thalweg
