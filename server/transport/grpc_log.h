// This header is about what gRPC and protobuf themselves log.
#pragma once

#include "server/base/metrics.h"

namespace thalweg {

// Sends what gRPC and protobuf log to our log, for the whole process. Strangers can cause their
// errors as often as they like, so only some of them are logged (LogLimit). Idempotent; the first
// call comes before any other thread parses messages.
void RouteGrpcLog();

// A HandshakeFailures counts the TLS handshakes that fail in this process while it exists, at
// either end. gRPC tells of them in its log only, and neither who the other end was nor, reliably,
// what was wrong with it. Requires RouteGrpcLog.
class HandshakeFailures {
 public:
  // `metrics` must outlive the object.
  explicit HandshakeFailures(MetricRegistry& metrics);
  ~HandshakeFailures();
  HandshakeFailures(const HandshakeFailures&) = delete;
  HandshakeFailures& operator=(const HandshakeFailures&) = delete;

 private:
  Counter& counter_;
};

}  // namespace thalweg
