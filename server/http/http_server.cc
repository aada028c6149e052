#include "server/http/http_server.h"

#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/thread.h"
#include "httplib.h"
#include "server/base/log.h"
#include "server/http/doorkeeper.h"
#include "server/http/prometheus_text.h"
#include "server/http/token.h"
#include "server/net/address.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

constexpr char kContentSecurityPolicy[] =
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
// More than the doorkeeper lets stay, because new connections come between its looks.
constexpr int kThreads = 24;
constexpr std::chrono::seconds kSocketTimeout(5);

// Connections are answered by a pool, and counted.
class CountedPool : public httplib::TaskQueue {
 public:
  explicit CountedPool(Doorkeeper& door) : door_(door), pool_(kThreads) {}

  void enqueue(std::function<void()> answer) override {
    door_.Opened();
    pool_.enqueue([this, answer = std::move(answer)] {
      answer();
      door_.Closed();
    });
  }
  void shutdown() override { pool_.shutdown(); }

 private:
  Doorkeeper& door_;
  httplib::ThreadPool pool_;
};

// Unlike httplib's default, a second server on the same port is an error.
void AllowQuickRestart(socket_t socket) {
  const int yes = 1;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
}

// Each connection reads the certificate again: connections are few, and a replaced file takes
// effect at once.
int UseCertificate(SSL* connection, void* files) {
  const auto& tls = *static_cast<const TlsFiles*>(files);
  const bool used = SSL_use_certificate_chain_file(connection, tls.cert.c_str()) == 1 &&
                    SSL_use_PrivateKey_file(connection, tls.key.c_str(), SSL_FILETYPE_PEM) == 1;
  return used ? 1 : 0;
}

// `files` must outlive the server.
std::unique_ptr<httplib::Server> MakeServer(TlsFiles& files) {
  if (!files.enabled()) return std::make_unique<httplib::Server>();
  return std::make_unique<httplib::SSLServer>([&files](SSL_CTX& context) {
    SSL_CTX_set_cert_cb(&context, UseCertificate, &files);
    return SSL_CTX_set_min_proto_version(&context, TLS1_2_VERSION) == 1;
  });
}

class HttplibServer final : public HttpServer {
 public:
  HttplibServer(const Options& options, MetricRegistry& metrics,
                std::function<absl::Status()> ready, HttpHandler pages)
      : options_(options),
        ended_(metrics.GetCounter("thalweg_http_ended_connections_total",
                                  "Connections to the HTTP port that were ended because they were "
                                  "too many, took too long or sent too much")),
        server_(MakeServer(options_.tls)),
        http_(*server_) {
    if (options_.tls.enabled()) expiry_.emplace(options_.tls, metrics);
    http_.new_task_queue = [this] { return new CountedPool(*door_); };
    http_.set_socket_options([this](socket_t socket) {
      AllowQuickRestart(socket);
      listener_ = socket;
    });
    http_.set_read_timeout(kSocketTimeout);
    http_.set_write_timeout(kSocketTimeout);
    // An open connection occupies a thread: browsers that come back every second would leave none
    // for probes.
    http_.set_keep_alive_max_count(1);
    http_.set_keep_alive_timeout(1);  // seconds; Stop waits for idle connections
    http_.Get("/metrics", [this, &metrics](const httplib::Request&, httplib::Response& response) {
      if (expiry_.has_value()) expiry_->Refresh();
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
    Route(std::move(pages));
  }
  ~HttplibServer() override { Stop(); }

  absl::Status Listen() {
    if (!http_.is_valid()) return absl::InternalError("OpenSSL refuses to serve HTTPS");
    THALWEG_ASSIGN_OR_RETURN(address_, ParseHostPort(options_.listen));
    if (address_.port == 0) {
      address_.port = http_.bind_to_any_port(address_.host);
    } else if (!http_.bind_to_port(address_.host, address_.port)) {
      address_.port = -1;
    }
    if (address_.port <= 0) {
      return absl::UnavailableError(absl::StrCat("cannot serve HTTP on ", options_.listen,
                                                 ": is the port taken, or the host not ours?"));
    }
    // httplib lets five connections wait, and the kernel drops others, probes among them.
    listen(listener_, SOMAXCONN);
    door_.emplace(Doorkeeper::Options{.port = address_.port}, ended_);
    thread_ = Thread("http", [this] { http_.listen_after_bind(); });
    // httplib ignores stop() before its loop runs; an answered request proves that the loop runs.
    httplib::Client probe(absl::StrCat(scheme(), "://", address()));
    probe.enable_server_certificate_verification(false);  // the certificate is ours
    probe.set_connection_timeout(kSocketTimeout);
    probe.set_read_timeout(kSocketTimeout);
    if (!probe.Get("/healthz")) {
      return absl::UnavailableError(absl::StrCat("HTTP on ", address(), " does not answer"));
    }
    return absl::OkStatus();
  }

  std::string address() const override { return ToString(address_); }
  std::string scheme() const override { return options_.tls.enabled() ? "https" : "http"; }

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
  }

  // Refuses what would take memory without need, before httplib reads a body: it keeps all of one
  // that comes in chunks, and repeats a page for each range of it. Returns whether it has answered.
  static bool Refuse(const httplib::Request& request, httplib::Response& response) {
    if (!IsRead(request)) {
      response.status = 405;
      response.set_header("Allow", "GET, HEAD");
      return true;
    }
    if (request.ranges.size() <= 1) return false;
    response.status = 416;
    return true;
  }

  // Pages do not use httplib's routes, which are regular expressions whose stack grows with the
  // path.
  void Route(HttpHandler pages) {
    http_.set_pre_routing_handler([this, pages = std::move(pages)](const httplib::Request& request,
                                                                   httplib::Response& response) {
      if (Refuse(request, response)) return httplib::Server::HandlerResponse::Handled;
      if (!IsProbe(request.path) && !Admits(request)) {
        response.status = 401;
        response.set_header("WWW-Authenticate", "Basic realm=\"thalweg\", charset=\"UTF-8\"");
        response.set_content("this needs the token of --http-token-file\n", "text/plain");
        return httplib::Server::HandlerResponse::Handled;
      }
      if (pages == nullptr || IsOurs(request.path)) {
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
  static bool IsProbe(const std::string& path) { return path == "/healthz" || path == "/readyz"; }
  static bool IsOurs(const std::string& path) { return path == "/metrics" || IsProbe(path); }

  // The file is read each time, so that it may be replaced. While it is missing, every request is
  // refused.
  bool Admits(const httplib::Request& request) const {
    if (options_.token_file.empty()) return true;
    const auto token = ReadToken(options_.token_file);
    if (!token.ok()) spdlog::warn("{}", Text(token.status()));
    return token.ok() && HasToken(request.get_header_value("Authorization"), *token);
  }

  Options options_;
  Counter& ended_;
  std::optional<CertificateExpiry> expiry_;
  std::optional<Doorkeeper> door_;  // of the port that is bound
  HostPort address_;
  socket_t listener_ = INVALID_SOCKET;  // httplib's
  const std::unique_ptr<httplib::Server> server_;
  httplib::Server& http_;  // *server_
  Mutex join_mutex_;
  Thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const Options& options,
                                                              MetricRegistry& metrics,
                                                              std::function<absl::Status()> ready,
                                                              HttpHandler pages) {
  if (!options.token_file.empty()) {
    THALWEG_RETURN_IF_ERROR(ReadToken(options.token_file).status());
  }
  auto server =
      std::make_unique<HttplibServer>(options, metrics, std::move(ready), std::move(pages));
  THALWEG_RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace thalweg
