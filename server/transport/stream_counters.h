// What passes through gRPC's streams, and waits for them.
#pragma once

#include <string>

#include "core/base/metrics.h"

namespace thalweg {

struct StreamCounters {
  Counter& sent;
  Counter& received;
  Histogram& send_seconds;  // of each frame, from being queued until gRPC has taken it
  Gauge& queued_bytes;      // of frames, until then

  // thalweg_grpc_… with role `role`: "server" or "client".
  static StreamCounters In(MetricRegistry& metrics, const std::string& role);
};

}  // namespace thalweg
