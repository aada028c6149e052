// Callers are those on the other machine: what their certificates say, and whether a membership is
// theirs.
#pragma once

#include "absl/status/status.h"
#include "core/base/exchange.h"
#include "core/base/metrics.h"
#include "core/base/refusals.h"
#include "grpcpp/grpcpp.h"

namespace thalweg {

// Returns the names in the certificate of whoever calls; none without TLS.
PeerNames NamesOf(const grpc::ServerContextBase& context);

// A Callers is thread-safe.
class Callers {
 public:
  // Both must outlive the object.
  Callers(Shard& shard, MetricRegistry& metrics) : shard_(shard), refusals_(metrics) {}

  // Returns PermissionDenied if the membership's node has joined with a certificate of another
  // name, and the shard cares (Shard::PrincipalOf).
  absl::Status CheckToken(const grpc::ServerContextBase& context, SessionToken token);
  // Counts and logs that the caller has not proved the secret of the job that it names.
  void NotProved(const grpc::ServerContextBase& context, const absl::Status& why);

 private:
  Shard& shard_;
  Refusals refusals_;
};

}  // namespace thalweg
