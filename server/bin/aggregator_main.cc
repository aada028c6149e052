// thalweg-aggregator: one aggregator shard.

#include <spdlog/spdlog.h>

#include <memory>
#include <string>

#include "core/base/env.h"
#include "core/base/log.h"
#include "server/aggregator/aggregator.h"
#include "server/bin/program.h"
#include "server/transport/http_server.h"
#include "server/transport/shard_server.h"

namespace thalweg {
namespace {

constexpr Duration kSignalPoll = std::chrono::milliseconds(200);
constexpr Duration kStopGrace = std::chrono::seconds(2);

struct Flags {
  std::string listen = GetEnv("THALWEG_LISTEN");
  std::string http = GetEnv("THALWEG_HTTP");
  double drain_seconds = 30;
  int ready_fd = -1;
};

int Serve(const Flags& flags, Signals& signals) {
  MetricRegistry registry;
  Aggregator aggregator({}, registry);
  auto server = ShardServer::Start({flags.listen}, aggregator, registry);
  if (!server.ok()) {
    spdlog::error("{}", Text(server.status()));
    return 1;
  }
  std::unique_ptr<HttpServer> http;
  if (!flags.http.empty()) {
    auto started = HttpServer::Start(flags.http, registry, [] { return absl::OkStatus(); });
    if (!started.ok()) {
      spdlog::error("{}", Text(started.status()));
      return 1;
    }
    http = *std::move(started);
  }
  spdlog::info("serving on {}{}", (*server)->address(),
               http == nullptr ? "" : ", metrics on " + http->address());
  AnnounceReady(flags.ready_fd, (*server)->address(), http == nullptr ? "" : http->address());

  while (!signals.Wait(kSignalPoll)) {
  }
  spdlog::info("shutting down: waiting up to {} s for {} jobs", flags.drain_seconds,
               aggregator.num_jobs());
  const TimePoint deadline = Now() + FromSeconds(flags.drain_seconds);
  while (!aggregator.Drain(std::min(deadline, Now() + kSignalPoll))) {
    // A second signal means now.
    if (Now() >= deadline || signals.Wait(Duration::zero())) break;
  }
  aggregator.Stop(absl::UnavailableError("the aggregator is shutting down"));
  (*server)->Stop(kStopGrace);
  return 0;
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  thalweg::Signals signals;
  thalweg::InitLogging("thalweg-aggregator");
  thalweg::Flags flags;
  CLI::App app("Sums the gradients that the nodes of a training job send, and returns the mean.");
  app.add_option("--listen", flags.listen, "host:port to serve gRPC on; port 0 takes a free one");
  app.add_option("--http", flags.http, "host:port for /metrics, /healthz, /readyz; empty: none");
  app.add_option("--drain-seconds", flags.drain_seconds,
                 "How long SIGTERM lets running jobs finish");
  thalweg::AddCommonOptions(app, &flags.ready_fd);
  CLI11_PARSE(app, argc, argv);
  return thalweg::Serve(flags, signals);
}
