#include "server/transport/stream_counters.h"

namespace thalweg {

StreamCounters StreamCounters::In(MetricRegistry& metrics, const std::string& role) {
  return {metrics.GetCounter("thalweg_grpc_sent_payload_bytes_total",
                             "Gradient bytes handed to gRPC", {{"role", role}}),
          metrics.GetCounter("thalweg_grpc_received_payload_bytes_total",
                             "Gradient bytes received through gRPC", {{"role", role}})};
}

}  // namespace thalweg
