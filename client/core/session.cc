#include "client/core/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/connects.h"
#include "client/core/fork_guard.h"
#include "client/core/hello.h"
#include "client/core/ipc_path.h"
#include "client/core/pinned_path.h"
#include "client/core/sidecar_session.h"
#include "core/base/status_macros.h"
#include "core/ipc/connection.h"

namespace thalweg {
namespace {

// How long CancelConnects may take.
constexpr Duration kLookAtCancelled = std::chrono::milliseconds(100);

// `cancelled`: CancelledConnects() when the call began.
absl::StatusOr<ipc::Welcome> AwaitWelcome(Connection& connection, const SessionOptions& options,
                                          uint64_t cancelled, TimePoint deadline) {
  absl::StatusOr<Received> received;
  do {
    received = connection.Receive(std::min(deadline, Now() + kLookAtCancelled));
    if (CancelledConnects() != cancelled) {
      return absl::CancelledError(absl::StrCat("job '", options.job, "': rank ", options.rank,
                                               " does not wait for the others any more"));
    }
  } while (absl::IsDeadlineExceeded(received.status()) && Now() < deadline);
  if (absl::IsDeadlineExceeded(received.status())) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job '", options.job, "': the sidecar at ", options.sidecar_path, " did not admit rank ",
        options.rank, " within ", ToSeconds(options.timeout), " s"));
  }
  if (!received.ok()) {
    return absl::Status(received.status().code(),
                        absl::StrCat("job '", options.job, "': the sidecar at ",
                                     options.sidecar_path, ": ", received.status().message()));
  }
  if (const auto* fail = std::get_if<ipc::Fail>(&received->message)) {
    return absl::Status(fail->code, fail->message);
  }
  const auto* welcome = std::get_if<ipc::Welcome>(&received->message);
  if (welcome == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sidecar answered with ", Name(received->message)));
  }
  if (welcome->chunk_bytes < kMinChunkBytes || welcome->chunk_bytes > kMaxChunkBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar asks for chunks of ",
                                                   welcome->chunk_bytes, " bytes, expected ",
                                                   kMinChunkBytes, " to ", kMaxChunkBytes));
  }
  if (welcome->num_shards == 0) {
    return absl::InvalidArgumentError("the sidecar says that it has no aggregator shards");
  }
  return *welcome;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(const SessionOptions& options) {
  const TimePoint deadline = Now() + options.timeout;
  const uint64_t cancelled = CancelledConnects();
  ipc::Hello hello = MakeHello(options);
  std::unique_ptr<DevicePath> pinned;
  std::unique_ptr<DevicePath> ipc;
  if (options.device != nullptr) {
    THALWEG_ASSIGN_OR_RETURN(pinned, PinnedPath::Create(options.device));
    hello.path = pinned->path();
    // Not every device and system supports sharing, and the sidecar may not support it either.
    if (auto shared = IpcPath::Create(options.device); shared.ok()) {
      hello.probe = (*shared)->probe();
      ipc = *std::move(shared);
    }
  }
  THALWEG_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                           Connection::Connect(options.sidecar_path, deadline));
  const ForkGuard fork_guard([raw = connection.get()] { raw->CloseInChild(); });
  THALWEG_RETURN_IF_ERROR(connection->Send(hello));
  THALWEG_ASSIGN_OR_RETURN(const ipc::Welcome welcome,
                           AwaitWelcome(*connection, options, cancelled, deadline));
  std::unique_ptr<DevicePath> path = std::move(welcome.path == GradientPath::kIpc ? ipc : pinned);
  if (welcome.path != (path == nullptr ? GradientPath::kCpu : path->path())) {
    return absl::InvalidArgumentError(absl::StrCat("the sidecar asks for gradients by the path ",
                                                   Name(welcome.path), ", which was not offered"));
  }
  // The path is closed first: work queued to test sharing may not be done yet, and memory in use
  // would be left behind.
  if (ipc != nullptr) ipc->Close(deadline);
  return std::make_unique<SidecarSession>(options, hello, welcome, std::move(connection),
                                          std::move(path));
}

}  // namespace thalweg
