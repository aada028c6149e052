// Bytes of gradients that pass through gRPC.
#pragma once

#include <string>

#include "core/base/metrics.h"

namespace thalweg {

struct StreamCounters {
  Counter& sent;
  Counter& received;

  // thalweg_grpc_{sent,received}_payload_bytes_total with role `role`: "server" or "client".
  static StreamCounters In(MetricRegistry& metrics, const std::string& role);
};

}  // namespace thalweg
