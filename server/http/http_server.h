// The page that operators and probes read: Prometheus metrics, liveness and readiness.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/http_reply.h"
#include "core/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// GET /metrics (Prometheus text format 0.0.4), /healthz (200 while the process answers), /readyz
// (200, or 503 with the reason), and what a handler has. Nothing can be changed: methods other than
// GET and HEAD get 405. Browsers are told to keep nothing, to load nothing from elsewhere and to
// show it in no frame. Thread-safe; owns its threads.
class HttpServer {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes a free one
    // HTTPS when enabled; a file that is replaced counts for the next connection. No certificate is
    // asked of clients: probes and browsers have none.
    TlsFiles tls = {};
    // A file with a token, without which all but /healthz and /readyz is 401 (token.h). Empty: all
    // may read.
    std::string token_file = "";
  };

  // `metrics`, which gets the expiry of the certificates, and what `ready` uses must outlive the
  // server; `ready` is called from several threads and must not block. `pages` answers all other
  // paths; without it they are not found. Unavailable when the address cannot be bound,
  // InvalidArgument when there is no token in its file.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const Options& options,
                                                           MetricRegistry& metrics,
                                                           std::function<absl::Status()> ready,
                                                           HttpHandler pages = nullptr);
  // Stops.
  virtual ~HttpServer() = default;

  // host:port with the port really bound.
  virtual std::string address() const = 0;
  // "http" or "https".
  virtual std::string scheme() const = 0;
  // Ends when requests in progress have been answered. Idempotent.
  virtual void Stop() = 0;
};

}  // namespace thalweg
