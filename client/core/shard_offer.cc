#include "client/core/shard_offer.h"

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"

namespace thalweg {

absl::StatusOr<std::unique_ptr<ShardOffer>> ShardOffer::Ask(const std::string& sidecar_path,
                                                            const std::string& job,
                                                            const std::string& secret,
                                                            Duration timeout) {
  const TimePoint deadline = Now() + timeout;
  THALWEG_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                           Connection::Connect(sidecar_path, deadline));
  THALWEG_RETURN_IF_ERROR(connection->Send(ipc::HostShard{kIpcVersion, job, secret}));
  auto received = connection->Receive(deadline);
  if (!received.ok()) {
    return absl::Status(
        received.status().code(),
        absl::StrCat("job '", job, "': the sidecar at ", sidecar_path,
                     " did not say whether it hosts a shard: ", received.status().message()));
  }
  if (const auto* fail = std::get_if<ipc::Fail>(&received->message)) {
    return absl::Status(fail->code,
                        absl::StrCat("job '", job, "': the sidecar at ", sidecar_path,
                                     " refuses to host a shard: ", fail->message,
                                     fail->code == absl::StatusCode::kInvalidArgument
                                         ? ": is its Thalweg version that of the worker?"
                                         : ""));
  }
  auto* const answer = std::get_if<ipc::ShardHosted>(&received->message);
  if (answer == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sidecar answered with ", Name(received->message)));
  }
  return std::unique_ptr<ShardOffer>(new ShardOffer(std::move(connection), std::move(*answer)));
}

}  // namespace thalweg
