#include "server/transport/stream_counters.h"

namespace thalweg {

StreamCounters StreamCounters::In(MetricRegistry& metrics, const std::string& role) {
  return {metrics.GetCounter("thalweg_grpc_sent_payload_bytes_total",
                             "Gradient bytes handed to gRPC", {{"role", role}}),
          metrics.GetCounter("thalweg_grpc_received_payload_bytes_total",
                             "Gradient bytes received through gRPC", {{"role", role}}),
          metrics.GetHistogram("thalweg_grpc_send_seconds",
                               "Time from queueing a frame until gRPC has taken all of it: "
                               "contributions of a client, results of a server",
                               {{"role", role}}),
          metrics.GetGauge("thalweg_grpc_queued_bytes",
                           "Bytes of frames that gRPC has not taken yet", {{"role", role}}),
          metrics.GetCounter("thalweg_grpc_resumed_streams_total",
                             "Streams that broke and were opened again without losing anything",
                             {{"role", role}})};
}

}  // namespace thalweg
