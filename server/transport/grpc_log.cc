#include "server/transport/grpc_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <set>
#include <string>

#include "absl/strings/match.h"
#include "core/base/mutex.h"
#include "core/base/protocol.h"
#include "server/base/log_limit.h"
#include "server/base/printable.h"

namespace thalweg {
namespace {

// These count now. gRPC's threads may outlive main.
struct HandshakeCounters {
  Mutex mutex;
  std::multiset<Counter*> all ABSL_GUARDED_BY(mutex);
};
HandshakeCounters& Handshakes() {
  static HandshakeCounters& counters = *new HandshakeCounters;
  return counters;
}

void CountFailedHandshake() {
  HandshakeCounters& counters = Handshakes();
  MutexLock lock(counters.mutex);
  for (Counter* counter : counters.all) counter->Add();
}

void Write(gpr_log_func_args* line) {
  if (absl::StartsWith(line->message, "Handshake failed with fatal error")) CountFailedHandshake();
  static LogLimit& errors = *new LogLimit("of gRPC");  // gRPC's threads may outlive main
  const bool is_error = line->severity == GPR_LOG_SEVERITY_ERROR;
  if (is_error && !errors.Admits(Now())) return;
  // gRPC is silent below errors unless GRPC_VERBOSITY asks for more, which ours need not hide.
  spdlog::log(is_error ? spdlog::level::warn : spdlog::level::info, "gRPC: {}",
              Printable(line->message, kMaxReasonBytes));
}

// Protobuf complains of each text of a peer that is not UTF-8.
void WriteOfProtobuf(google::protobuf::LogLevel /*level*/, const char* /*file*/, int /*line*/,
                     const std::string& message) {
  static LogLimit& lines = *new LogLimit("of protobuf");
  if (lines.Admits(Now())) spdlog::warn("protobuf: {}", Printable(message, kMaxReasonBytes));
}

}  // namespace

void RouteGrpcLog() {
  gpr_set_log_function(Write);
  // Protobuf's handler may be set only while no other thread parses.
  [[maybe_unused]] static const auto before = google::protobuf::SetLogHandler(WriteOfProtobuf);
}

HandshakeFailures::HandshakeFailures(MetricRegistry& metrics)
    : counter_(metrics.GetCounter(
          "thalweg_grpc_handshakes_failed_total",
          "TLS handshakes of gRPC connections that have failed: the other end has no certificate, "
          "or one that has expired or is of another CA, or speaks no TLS")) {
  HandshakeCounters& counters = Handshakes();
  MutexLock lock(counters.mutex);
  counters.all.insert(&counter_);
}

HandshakeFailures::~HandshakeFailures() {
  HandshakeCounters& counters = Handshakes();
  MutexLock lock(counters.mutex);
  counters.all.erase(counters.all.find(&counter_));
}

}  // namespace thalweg
