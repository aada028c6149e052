// HttpServer serves Prometheus metrics, liveness and readiness to operators and probes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/http_reply.h"
#include "server/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// An HttpServer answers GET /metrics (Prometheus text format 0.0.4), /healthz (200 while the
// process answers), /readyz (200, or 503 with the reason), and the paths of a handler. Nothing can
// be changed: methods other than GET and HEAD get 405, and their bodies are not read; several
// ranges of a page get 416. A request of more than 64 KiB gets no answer. Responses tell browsers
// to cache nothing, to load nothing from elsewhere and not to be framed. Thread-safe; the server
// owns its threads.
class HttpServer {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes a free one
    // HTTPS when enabled; a replaced file takes effect with the next connection. Clients need no
    // certificate: probes and browsers have none.
    TlsFiles tls = {};
    // A file with a token that all paths but /healthz and /readyz require; without it they answer
    // 401 (token.h). When empty, everybody may read.
    std::string token_file = "";
  };

  // Starts the server. `metrics`, which gets the expiry of the certificates, and what `ready` uses
  // must outlive it; `ready` is called from several threads and must not block. `pages` answers all
  // other paths; without it they get 404. Returns Unavailable when the address cannot be bound,
  // InvalidArgument when the token file contains no token.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const Options& options,
                                                           MetricRegistry& metrics,
                                                           std::function<absl::Status()> ready,
                                                           HttpHandler pages = nullptr);
  // Calls Stop.
  virtual ~HttpServer() = default;

  // Returns host:port with the port that is actually bound.
  virtual std::string address() const = 0;
  // Returns "http" or "https".
  virtual std::string scheme() const = 0;
  // Returns when the requests in progress have been answered. Idempotent.
  virtual void Stop() = 0;
};

}  // namespace thalweg
