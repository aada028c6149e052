#include "server/transport/http_server.h"

#include <atomic>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/log.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "httplib.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"
#include "server/transport/address.h"

namespace thalweg {
namespace {

constexpr char kPrometheusType[] = "text/plain; version=0.0.4; charset=utf-8";
constexpr char kContentSecurityPolicy[] =
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
constexpr int kThreads = 4;
constexpr std::chrono::seconds kSocketTimeout(5);

// Unlike httplib's default, a second server on the same port is an error.
void AllowQuickRestart(socket_t socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

class HttplibServer final : public HttpServer {
 public:
  HttplibServer(const MetricRegistry& metrics, std::function<absl::Status()> ready,
                HttpHandler pages) {
    http_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    http_.set_socket_options(AllowQuickRestart);
    http_.set_read_timeout(kSocketTimeout);
    http_.set_write_timeout(kSocketTimeout);
    // A connection holds a thread while it is open: those of browsers that come back every second
    // would leave none for probes.
    http_.set_keep_alive_max_count(1);
    http_.set_keep_alive_timeout(1);  // seconds; Stop waits for idle connections
    http_.set_payload_max_length(0);
    http_.Get("/metrics", [&metrics](const httplib::Request&, httplib::Response& response) {
      response.set_content(PrometheusText(metrics), kPrometheusType);
    });
    http_.Get("/healthz", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("ok\n", "text/plain");
    });
    http_.Get("/readyz",
              [ready = std::move(ready)](const httplib::Request&, httplib::Response& response) {
                const absl::Status status = ready();
                response.status = status.ok() ? 200 : 503;
                response.set_content(status.ok() ? "ready\n" : absl::StrCat(Text(status), "\n"),
                                     "text/plain; charset=utf-8");
              });
    Restrict();
    if (pages) Serve(std::move(pages));
  }
  ~HttplibServer() override { Stop(); }

  absl::Status Listen(const std::string& listen) {
    THALWEG_ASSIGN_OR_RETURN(address_, ParseHostPort(listen));
    if (address_.port == 0) {
      address_.port = http_.bind_to_any_port(address_.host);
    } else if (!http_.bind_to_port(address_.host, address_.port)) {
      address_.port = -1;
    }
    if (address_.port <= 0) {
      return absl::UnavailableError(absl::StrCat("cannot serve HTTP on ", listen,
                                                 ": is the port taken, or the host not ours?"));
    }
    thread_ = Thread("http", [this] { http_.listen_after_bind(); });
    // Before the loop runs, httplib ignores stop(); an answered request proves that it does.
    httplib::Client probe(address_.host, address_.port);
    probe.set_connection_timeout(kSocketTimeout);
    probe.set_read_timeout(kSocketTimeout);
    if (!probe.Get("/healthz")) {
      return absl::UnavailableError(absl::StrCat("HTTP on ", address(), " does not answer"));
    }
    return absl::OkStatus();
  }

  std::string address() const override { return ToString(address_); }

  void Stop() override {
    http_.stop();
    MutexLock lock(join_mutex_);
    thread_.Join();
  }

 private:
  void Restrict() {
    http_.set_default_headers({{"Cache-Control", "no-store"},
                               {"Content-Security-Policy", kContentSecurityPolicy},
                               {"Referrer-Policy", "no-referrer"},
                               {"X-Content-Type-Options", "nosniff"}});
    http_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (response.status != 404 || IsRead(request)) return;
      response.status = 405;
      response.set_header("Allow", "GET, HEAD");
    });
  }

  // Not as httplib's routes: those are regular expressions, whose stack grows with the path.
  void Serve(HttpHandler pages) {
    http_.set_pre_routing_handler(
        [pages = std::move(pages)](const httplib::Request& request, httplib::Response& response) {
          if (!IsRead(request) || IsOurs(request.path)) {
            return httplib::Server::HandlerResponse::Unhandled;
          }
          const HttpReply reply = pages(request.path);
          response.status = reply.status;
          response.set_content(reply.body, reply.type);
          return httplib::Server::HandlerResponse::Handled;
        });
  }

  static bool IsRead(const httplib::Request& request) {
    return request.method == "GET" || request.method == "HEAD";
  }
  static bool IsOurs(const std::string& path) {
    return path == "/metrics" || path == "/healthz" || path == "/readyz";
  }

  HostPort address_;
  httplib::Server http_;
  Mutex join_mutex_;
  Thread thread_;
};

// Prometheus counts in each bucket also what is in those below.
prometheus::ClientMetric::Histogram ToPrometheus(const MetricRegistry::Sample& sample) {
  prometheus::ClientMetric::Histogram out;
  out.sample_sum = sample.value;
  for (size_t i = 0; i < sample.counts.size(); ++i) {
    out.sample_count += sample.counts[i];
    const double bound =
        i < Histogram::kBounds ? Histogram::Bound(i) : std::numeric_limits<double>::infinity();
    out.bucket.push_back({out.sample_count, bound});
  }
  return out;
}

prometheus::MetricFamily ToPrometheus(const MetricRegistry::Family& family) {
  prometheus::MetricFamily out;
  out.name = family.name;
  out.help = family.help;
  for (const MetricRegistry::Sample& sample : family.samples) {
    prometheus::ClientMetric& metric = out.metric.emplace_back();
    for (const auto& [name, value] : sample.labels) metric.label.push_back({name, value});
    switch (family.kind) {
      case MetricRegistry::Kind::kCounter:
        out.type = prometheus::MetricType::Counter;
        metric.counter.value = sample.value;
        break;
      case MetricRegistry::Kind::kGauge:
        out.type = prometheus::MetricType::Gauge;
        metric.gauge.value = sample.value;
        break;
      case MetricRegistry::Kind::kHistogram:
        out.type = prometheus::MetricType::Histogram;
        metric.histogram = ToPrometheus(sample);
        break;
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& listen,
                                                              const MetricRegistry& metrics,
                                                              std::function<absl::Status()> ready,
                                                              HttpHandler pages) {
  auto server = std::make_unique<HttplibServer>(metrics, std::move(ready), std::move(pages));
  THALWEG_RETURN_IF_ERROR(server->Listen(listen));
  return server;
}

std::string PrometheusText(const MetricRegistry& registry) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& family : registry.Snapshot()) families.push_back(ToPrometheus(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace thalweg
