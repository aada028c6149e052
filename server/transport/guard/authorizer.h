// Authorizer decides whether a membership belongs to the caller on the other machine, by what its
// certificate says.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "core/base/tenant.h"
#include "grpcpp/grpcpp.h"
#include "server/base/metrics.h"
#include "server/base/refusals.h"

namespace thalweg {

// Returns the names in the certificate of whoever calls; none without TLS.
PeerNames NamesOf(const grpc::ServerContextBase& context);

// Returns the address of whoever calls, without the port.
std::string AddressOf(const grpc::ServerContextBase& context);

// An Authorizer is thread-safe.
class Authorizer {
 public:
  // `metrics` must outlive the object.
  explicit Authorizer(MetricRegistry& metrics) : refusals_(metrics) {}

  // Returns PermissionDenied if a membership that belongs to the certificate `owner` (empty: to
  // whoever shows its token) is used by a caller with another one.
  absl::Status CheckOwner(const grpc::ServerContextBase& context, const std::string& owner);
  // Counts and logs that the caller has not proved the secret of the job that it names.
  void NotProved(const grpc::ServerContextBase& context, const absl::Status& why);

 private:
  Refusals refusals_;
};

}  // namespace thalweg
