#include "server/transport/grpc_log.h"

#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include "core/base/log_limit.h"
#include "core/base/printable.h"
#include "core/base/protocol.h"

namespace thalweg {
namespace {

void Write(gpr_log_func_args* line) {
  static LogLimit& errors = *new LogLimit("of gRPC");  // gRPC's threads may outlive main
  const bool is_error = line->severity == GPR_LOG_SEVERITY_ERROR;
  if (is_error && !errors.Admits(Now())) return;
  // gRPC is silent below errors unless GRPC_VERBOSITY asks for more, which ours need not hide.
  spdlog::log(is_error ? spdlog::level::warn : spdlog::level::info, "gRPC: {}",
              Printable(line->message, kMaxReasonBytes));
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Write); }

}  // namespace thalweg
