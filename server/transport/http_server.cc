#include "server/transport/http_server.h"

#include <atomic>
#include <chrono>
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
constexpr int kThreads = 4;
constexpr std::chrono::seconds kSocketTimeout(5);

// Unlike httplib's default, a second server on the same port is an error.
void AllowQuickRestart(socket_t socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

class HttplibServer final : public HttpServer {
 public:
  HttplibServer(const MetricRegistry& metrics, std::function<absl::Status()> ready) {
    http_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    http_.set_socket_options(AllowQuickRestart);
    http_.set_read_timeout(kSocketTimeout);
    http_.set_write_timeout(kSocketTimeout);
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
  HostPort address_;
  httplib::Server http_;
  Mutex join_mutex_;
  Thread thread_;
};

prometheus::MetricFamily ToPrometheus(const MetricRegistry::Family& family) {
  const bool is_counter = family.kind == MetricRegistry::Kind::kCounter;
  prometheus::MetricFamily out;
  out.name = family.name;
  out.help = family.help;
  out.type = is_counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
  for (const MetricRegistry::Sample& sample : family.samples) {
    prometheus::ClientMetric& metric = out.metric.emplace_back();
    for (const auto& [name, value] : sample.labels) metric.label.push_back({name, value});
    (is_counter ? metric.counter.value : metric.gauge.value) = sample.value;
  }
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& listen,
                                                              const MetricRegistry& metrics,
                                                              std::function<absl::Status()> ready) {
  auto server = std::make_unique<HttplibServer>(metrics, std::move(ready));
  THALWEG_RETURN_IF_ERROR(server->Listen(listen));
  return server;
}

std::string PrometheusText(const MetricRegistry& registry) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& family : registry.Snapshot()) families.push_back(ToPrometheus(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace thalweg
