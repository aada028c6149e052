// thalweg-aggregator runs one aggregator shard.

#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/env.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/base/trace.h"
#include "server/aggregator/aggregator.h"
#include "server/aggregator/snapshot_writer.h"
#include "server/base/log.h"
#include "server/bin/program.h"
#include "server/http/http_server.h"
#include "server/net/kept_tls_files.h"
#include "server/page/site.h"
#include "server/snapshot/snapshot_folder.h"
#include "server/transport/shard/shard_server.h"

namespace thalweg {
namespace {

struct Flags {
  std::string listen = GetEnv("THALWEG_LISTEN");
  uint32_t threads = 0;  // 0 means auto
  uint32_t weight = 0;   // 0 means auto
  std::string state_dir = GetEnv("THALWEG_STATE_DIR");
  CommonOptions common;
};

// Waits for a signal, and then for the jobs that run.
void WaitForEnd(const Flags& flags, Aggregator& aggregator, PolicyFile* policy, KeptTlsFiles& tls,
                Signals& signals) {
  while (!signals.Wait(kSignalPoll)) {
    Refresh(policy, tls);
  }
  const size_t jobs = aggregator.num_jobs();
  spdlog::info("shutting down{}",
               jobs == 0 ? ""
                         : absl::StrCat(": waiting up to ", flags.common.drain_seconds, " s for ",
                                        jobs, jobs == 1 ? " job" : " jobs"));
  const TimePoint deadline = Now() + FromSeconds(flags.common.drain_seconds);
  while (!aggregator.Drain(std::min(deadline, Now() + kSignalPoll))) {
    // A second signal ends the wait.
    if (Now() >= deadline || signals.Wait(Duration::zero())) break;
    Refresh(policy, tls);
  }
}

absl::Status Serve(const Flags& flags, Signals& signals) {
  MetricRegistry registry;
  ExportProcessInfo(registry, "aggregator");
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<TraceWriter> trace,
                           TraceWriter::FromEnv("aggregator"));
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<KeptTlsFiles> tls,
                           KeptTlsFiles::Open(flags.common.tls));
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<PolicyFile> policy, OpenPolicy(flags.common));
  const uint64_t memory_bytes = MemoryOf(flags.common);
  std::unique_ptr<SnapshotFolder> folder;
  std::optional<SnapshotWriter> snapshots;
  if (!flags.state_dir.empty()) {
    THALWEG_ASSIGN_OR_RETURN(folder, SnapshotFolder::Open(flags.state_dir));
    snapshots.emplace(*folder, registry);
  }
  Aggregator aggregator({.weight = flags.weight,
                         .trace = trace.get(),
                         .memory_bytes = memory_bytes,
                         .policy = SourceOf(policy.get()),
                         .snapshots = snapshots ? &*snapshots : nullptr},
                        registry);
  const Site site({.shard = [&] { return aggregator.Report(Now()); }, .collectives = nullptr},
                  UnixSeconds());
  const uint32_t threads = flags.threads != 0 ? flags.threads : DefaultThreads();
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<ShardServer> server,
                           ShardServer::Start({.listen = flags.listen,
                                               .threads = threads,
                                               .tls = tls->copies(),
                                               .memory_bytes = memory_bytes},
                                              aggregator, registry));
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> http,
                           StartHttp(flags.common, tls->copies(), registry, signals, site));
  const std::string page = http == nullptr ? "" : http->scheme() + "://" + http->address();
  spdlog::info("serving on {}{}{}", server->address(),
               flags.common.tls.enabled() ? " by mutual TLS" : "",
               page.empty() ? "" : ", live page and metrics on " + page);
  AnnounceReady(flags.common.ready_fd, server->address(), http == nullptr ? "" : http->address());

  WaitForEnd(flags, aggregator, policy.get(), *tls, signals);
  aggregator.Stop(absl::UnavailableError("the aggregator is shutting down"));
  server->Stop(kStopGrace);
  return absl::OkStatus();
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  thalweg::PrepareProcess();
  thalweg::Signals signals;
  thalweg::InitLogging("thalweg-aggregator");
  thalweg::Flags flags;
  CLI::App app("Sums the gradients that the nodes of a training job send, and returns the mean.");
  app.add_option("--listen", flags.listen, "host:port to serve gRPC on; port 0 takes a free one");
  thalweg::AddAutoOption(app, "--threads", "THALWEG_THREADS", 64, &flags.threads,
                         "Threads that receive, sum and send; auto: one per 8 cores, 4 at most");
  thalweg::AddAutoOption(app, "--weight", "THALWEG_WEIGHT", thalweg::kMaxWeight, &flags.weight,
                         "How much of the gradients to sum, in proportion to the other shards' "
                         "weights; auto: as the links allow, if no shard has a weight");
  app.add_option("--state-dir", flags.state_dir,
                 "Folder for snapshots of the weights that jobs keep here; none: no snapshots");
  thalweg::AddCommonOptions(app, &flags.common);
  if (const std::optional<int> code = thalweg::Parse(app, argc, argv)) return *code;
  if (const absl::Status status = thalweg::ApplyCommonOptions(flags.common); !status.ok()) {
    spdlog::error("{}", thalweg::Text(status));
    return thalweg::kWrongArguments;
  }
  return thalweg::ExitCode(thalweg::Serve(flags, signals), flags.common.ready_fd);
}
