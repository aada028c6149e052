// StreamCounters counts what passes through gRPC's streams and what is queued for them.
#pragma once

#include <string>

#include "server/base/metrics.h"

namespace thalweg {

struct StreamCounters {
  Counter& sent;
  Counter& received;
  Histogram& send_seconds;  // per frame, from queueing until gRPC has taken it
  Gauge& queued_bytes;      // bytes of frames in that state
  Counter& resumed;         // streams that broke and were opened again

  // Registers thalweg_grpc_… with role `role`: "server" or "client".
  static StreamCounters In(MetricRegistry& metrics, const std::string& role);
};

}  // namespace thalweg
