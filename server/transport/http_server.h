// The page that operators and probes read: Prometheus metrics, liveness and readiness.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/http_reply.h"
#include "core/base/metrics.h"

namespace thalweg {

// GET /metrics (Prometheus text format 0.0.4), /healthz (200 while the process answers), /readyz
// (200, or 503 with the reason), and what a handler has. Nothing can be changed: methods other than
// GET and HEAD get 405. Browsers are told to keep nothing, to load nothing from elsewhere and to
// show it in no frame. Thread-safe; owns its threads.
class HttpServer {
 public:
  // `listen` is host:port, port 0 takes a free one. `metrics` and what `ready` uses must outlive
  // the server; `ready` is called from several threads and must not block. `pages` answers all
  // other paths; without it they are not found. Unavailable when the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& listen,
                                                           const MetricRegistry& metrics,
                                                           std::function<absl::Status()> ready,
                                                           HttpHandler pages = nullptr);
  // Stops.
  virtual ~HttpServer() = default;

  // host:port with the port really bound.
  virtual std::string address() const = 0;
  // Ends when requests in progress have been answered. Idempotent.
  virtual void Stop() = 0;
};

// All metrics of `registry` in Prometheus' text format.
std::string PrometheusText(const MetricRegistry& registry);

}  // namespace thalweg
