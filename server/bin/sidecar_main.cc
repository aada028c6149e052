// thalweg-sidecar reduces the gradients of one node's workers and exchanges them with the
// aggregators. Without aggregators it contains one itself (embedded mode).

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/env.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/base/trace.h"
#include "server/base/log.h"
#include "server/bin/gpus.h"
#include "server/bin/program.h"
#include "server/bin/respawn.h"
#include "server/bin/sidecar_shards.h"
#include "server/http/http_server.h"
#include "server/net/kept_tls_files.h"
#include "server/page/site.h"
#include "server/sidecar/device/cpu_device.h"
#include "server/sidecar/sidecar.h"

namespace thalweg {
namespace {

struct Flags {
  std::string socket = GetEnv("THALWEG_SIDECAR");
  std::string aggregators = GetEnv("THALWEG_AGGREGATORS");
  std::string shard_listen;
  double timeout_seconds = 0;
  uint32_t threads = 0;  // 0 means auto, here and in the next two
  uint32_t channels = 0;
  uint32_t window_chunks = 0;
  double reconnect_seconds = 10;
  bool exit_when_idle = false;
  bool respawn = false;
  bool own_dir = false;
  bool no_gpus = false;
  CommonOptions common;
};

uint32_t ThreadsOf(const Flags& flags) {
  return flags.threads != 0 ? flags.threads : DefaultThreads();
}

// Workers of a process that was killed look for the next one at once, but for no longer than they
// may. Some cannot go on with it, and do not come.
Duration PatienceForWorkers(const Flags& flags, bool takes_place) {
  const double until_they_come = flags.reconnect_seconds + 1;
  return FromSeconds(takes_place ? std::min(flags.timeout_seconds, until_they_come)
                                 : flags.timeout_seconds);
}

// Waits for a signal or, when the options ask for that, until the last worker has left and other
// nodes need this one's shard no more. `takes_place`: of a process that was killed.
void WaitForEnd(const Flags& flags, bool takes_place, Sidecar& sidecar, SidecarShards& shards,
                PolicyFile* policy, KeptTlsFiles& tls, Signals& signals) {
  const Duration patience = PatienceForWorkers(flags, takes_place);
  const TimePoint start = Now();
  while (!signals.Wait(kSignalPoll)) {
    Refresh(policy, tls);
    const Sidecar::Connections connections = sidecar.Reap();
    if (!flags.exit_when_idle || connections.now > 0 || shards.IsServing()) continue;
    if (connections.since_start > 0) {
      spdlog::debug("the last worker has left");
      return;
    }
    if (Now() - start > patience) {
      spdlog::log(takes_place ? spdlog::level::info : spdlog::level::err,
                  "no worker has connected within {} s", ToSeconds(patience));
      return;
    }
  }
  const size_t workers = sidecar.Reap().now;
  spdlog::info("shutting down{}",
               workers == 0
                   ? ""
                   : absl::StrCat(": waiting up to ", flags.common.drain_seconds, " s for ",
                                  workers, workers == 1 ? " worker" : " workers"));
  sidecar.StopAccepting();
  const TimePoint deadline = Now() + FromSeconds(flags.common.drain_seconds);
  // A second signal ends the wait.
  while ((sidecar.Reap().now > 0 || shards.IsServing()) && Now() < deadline &&
         !signals.Wait(kSignalPoll)) {
    Refresh(policy, tls);
  }
}

absl::Status Serve(const Flags& flags, KeptAddresses& kept, Signals& signals) {
  MetricRegistry registry;
  ExportProcessInfo(registry, "sidecar");
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<TraceWriter> trace,
                           TraceWriter::FromEnv("sidecar"));
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<KeptTlsFiles> tls,
                           KeptTlsFiles::Open(flags.common.tls));
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<PolicyFile> policy, OpenPolicy(flags.common));
  if (policy != nullptr && flags.shard_listen.empty()) {
    spdlog::warn(
        "the policy '{}' is not used: without --shard-listen no other node reaches a "
        "shard here",
        flags.common.policy);
  }
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<SidecarShards> shards,
                           SidecarShards::Start({.aggregators = flags.aggregators,
                                                 .listen = flags.shard_listen,
                                                 .threads = ThreadsOf(flags),
                                                 .channels = flags.channels,
                                                 .reconnect = FromSeconds(flags.reconnect_seconds),
                                                 .tls = tls->copies(),
                                                 .trace = trace.get(),
                                                 .memory_bytes = MemoryOf(flags.common),
                                                 .policy = SourceOf(policy.get())},
                                                registry));
  CpuDevice device;
  const std::unique_ptr<Device> gpus = flags.no_gpus ? nullptr : OpenGpus();
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<Sidecar> sidecar,
                           Sidecar::Start({.socket_path = flags.socket,
                                           .shards = &shards->directory(),
                                           .device = &device,
                                           .gpus = gpus.get(),
                                           .threads = ThreadsOf(flags),
                                           .window_chunks = flags.window_chunks,
                                           .trace = trace.get()},
                                          registry));
  Site::Sources sources{.shard = nullptr, .collectives = [&] { return sidecar->Flights(Now()); }};
  if (Aggregator* const own = shards->own()) sources.shard = [own] { return own->Report(Now()); };
  const Site site(std::move(sources), UnixSeconds());
  THALWEG_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> http,
                           StartHttp(flags.common, tls->copies(), registry, signals, site));
  spdlog::info("serving at {} with {}", flags.socket, shards->Describe());
  const std::string http_address = http == nullptr ? "" : http->address();
  const bool takes_place = kept.has_served();
  kept.Keep(shards->address(), http_address);
  AnnounceReady(flags.common.ready_fd, flags.socket, http_address);
  WaitForEnd(flags, takes_place, *sidecar, *shards, policy.get(), *tls, signals);
  sidecar->Stop(absl::UnavailableError("the sidecar is shutting down"));
  return absl::OkStatus();
}

void AddOptions(CLI::App& app, Flags* flags) {
  app.add_option("--socket", flags->socket, "Unix socket for the node's workers");
  app.add_option("--aggregators", flags->aggregators,
                 "host:port of every aggregator shard, comma separated, in the same order on all "
                 "nodes; none: aggregate in this process (one node only, unless the workers name "
                 "shards in sidecars)");
  app.add_option("--shard-listen", flags->shard_listen,
                 "host:port, or host:first-last, at which other nodes reach a shard that this "
                 "process then serves to its jobs; port 0 takes a free one");
  AddAutoOption(app, "--threads", "THALWEG_THREADS", 64, &flags->threads,
                "Threads that fold the workers' shares, and as many that wait for aggregators; "
                "auto: one per 8 cores, 4 at most");
  AddAutoOption(app, "--channels", "THALWEG_CHANNELS", 16, &flags->channels,
                "TCP connections to each aggregator; auto: by what the link carries");
  AddAutoOption(app, "--window-chunks", "THALWEG_WINDOW_CHUNKS", kMaxWindowChunks,
                &flags->window_chunks,
                "Chunks sent to an aggregator and not answered yet; auto: by what the "
                "link carries; the same on all nodes");
  app.add_option("--reconnect", flags->reconnect_seconds,
                 "Seconds in which a broken connection to an aggregator may come back, or an "
                 "aggregator that was restarted. The job waits so long; 0: it fails at once")
      ->envname("THALWEG_RECONNECT")
      ->check(Seconds(3600));
  app.add_option("--timeout", flags->timeout_seconds,
                 "With --exit-when-idle: seconds to wait for the first worker")
      ->check(Seconds(kMostTimeout));
  app.add_flag("--exit-when-idle", flags->exit_when_idle, "Exit once the last worker has left");
  app.add_flag("--respawn", flags->respawn,
               "Serve in a child process, and start another one when it is killed: its workers go "
               "on with that");
  app.add_flag("--no-gpus", flags->no_gpus,
               "Take gradients on GPUs through host memory, also where workers and this process "
               "could share the GPUs' memory");
  app.add_flag("--own-dir", flags->own_dir, "Remove the socket's folder at exit");
  AddCommonOptions(app, &flags->common);
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) {
  thalweg::PrepareProcess();
  thalweg::Signals signals;
  thalweg::InitLogging("thalweg-sidecar");
  thalweg::Flags flags;
  if (const absl::Status status = thalweg::ParseSeconds(
          thalweg::GetEnv("THALWEG_TIMEOUT"), thalweg::kMostTimeout, &flags.timeout_seconds);
      !status.ok()) {
    spdlog::error("THALWEG_TIMEOUT: {}", std::string(status.message()));
    return thalweg::kWrongArguments;
  }
  CLI::App app(
      "Reduces the gradients of one node's workers and exchanges them with the aggregators.");
  thalweg::AddOptions(app, &flags);
  if (const std::optional<int> code = thalweg::Parse(app, argc, argv)) return *code;
  if (const absl::Status status = thalweg::ApplyCommonOptions(flags.common); !status.ok()) {
    spdlog::error("{}", thalweg::Text(status));
    return thalweg::kWrongArguments;
  }
  if (flags.socket.empty()) {
    spdlog::error("no socket: give --socket PATH or set THALWEG_SIDECAR");
    return thalweg::kWrongArguments;
  }
  thalweg::KeptAddresses kept;
  std::optional<int> ended;
  if (flags.respawn) ended = thalweg::Respawn("the sidecar", &flags.common.ready_fd);
  if (!kept.shard().empty()) flags.shard_listen = kept.shard();
  if (!kept.http().empty()) flags.common.http = kept.http();
  const int code =
      ended ? *ended
            : thalweg::ExitCode(thalweg::Serve(flags, kept, signals), flags.common.ready_fd);
  if (flags.own_dir) {
    // A process that was killed has left the first two.
    std::error_code ignored;
    for (const std::filesystem::path& path :
         {std::filesystem::path(flags.socket), std::filesystem::path(flags.socket + ".lock"),
          std::filesystem::path(flags.socket).parent_path()}) {
      std::filesystem::remove(path, ignored);
    }
  }
  return code;
}
