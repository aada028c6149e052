#include "server/bin/program.h"

#include <sched.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cpu_capability.h"
#include "server/base/log.h"
#include "server/base/memory_limit.h"

namespace thalweg {
namespace {

constexpr uint64_t kLeastMemory = uint64_t{1} << 20;
constexpr double kMostDrainSeconds = 1e6;

// Returns what makes 0 of "auto".
CLI::Transformer Auto() {
  return CLI::Transformer(std::map<std::string, std::string>{{"auto", "0"}});
}

// Refuses 0, with a unit or without, which "auto" becomes: apply it before that.
CLI::Validator NoZero() {
  return {[](const std::string& text) -> std::string {
            const bool is_zero = text.find('0') != std::string::npos &&
                                 text.find_first_of("123456789") == std::string::npos;
            return is_zero ? "expected auto or more than 0, got '" + text + "'" : "";
          },
          ""};
}

// Refuses what is no memory limit that anyone means, such as 4 for 4G. 0 is automatic.
std::string WhyNoMemoryLimit(const std::string& text) {
  uint64_t bytes = 0;
  if (!absl::SimpleAtoi(text, &bytes) || bytes == 0 || bytes >= kLeastMemory) return "";
  return absl::StrCat(bytes, " bytes are less than any job needs: expected a unit, as in ", bytes,
                      "G");
}

sigset_t HandledSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// Lets the process open as many files and connections as it may.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  spdlog::info("may open {} descriptors", limit.rlim_cur);
}

absl::Status RestrictToCpus(const std::string& cpus) {
  if (cpus.empty()) return absl::OkStatus();
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const absl::string_view part : absl::StrSplit(cpus, ',')) {
    const std::vector<std::string> range = absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = -1;
    int last = -1;
    if (!absl::SimpleAtoi(range.front(), &first) || !absl::SimpleAtoi(range.back(), &last) ||
        first < 0 || last < first || last >= CPU_SETSIZE) {
      return absl::InvalidArgumentError(
          absl::StrCat("cores '", cpus, "': expected a list such as 0-3,8, got '", part, "'"));
    }
    for (int cpu = first; cpu <= last; ++cpu) CPU_SET(cpu, &set);
  }
  if (sched_setaffinity(0, sizeof set, &set) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("cannot run on cores '", cpus, "': ", std::strerror(errno)));
}

void Announce(int fd, const nlohmann::json& what) {
  if (fd < 0) return;
  const std::string line =
      what.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = write(fd, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      spdlog::warn("cannot write to --ready-fd {}: {}", fd, std::strerror(errno));
      break;
    }
    done += static_cast<size_t>(n);
  }
  close(fd);
}

}  // namespace

Signals::Signals() {
  const sigset_t set = HandledSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

bool Signals::Wait(Duration patience) {
  const sigset_t set = HandledSignals();
  const auto nanos = ToNanos(patience);
  const timespec timeout{nanos / 1'000'000'000, nanos % 1'000'000'000};
  if (sigtimedwait(&set, nullptr, &timeout) <= 0) return false;
  has_come_ = true;
  return true;
}

absl::Status Signals::Ready() const {
  if (!has_come_) return absl::OkStatus();
  return absl::UnavailableError("shutting down: takes no new jobs");
}

absl::Status ParseSeconds(const std::string& text, double most, double* seconds) {
  // NaN is neither below nor above a bound.
  if (absl::SimpleAtod(text, seconds) && *seconds >= 0 && *seconds <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected seconds from 0 to ", most, ", got '", text, "'"));
}

CLI::Validator Seconds(double most) {
  return {[most](const std::string& text) {
            double seconds = 0;
            return std::string(ParseSeconds(text, most, &seconds).message());
          },
          ""};
}

void Refresh(PolicyFile* policy, KeptTlsFiles& tls) {
  if (policy != nullptr) policy->Refresh(Now());
  tls.Refresh(Now());
}

absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(const CommonOptions& options,
                                                      const TlsFiles& tls, MetricRegistry& registry,
                                                      const Signals& signals, const Site& site) {
  if (options.http.empty()) return nullptr;
  return HttpServer::Start(
      {options.http, tls, options.http_token_file}, registry, [&] { return signals.Ready(); },
      [&](const std::string& path) { return site.Answer(path); });
}

void PrepareProcess() {
  // Debian's Abseil searches for deadlocks each time gRPC locks a mutex.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // With these experiments a read ends when the rest of a message has arrived, not with each
  // packet.
  setenv("GRPC_EXPERIMENTS", "tcp_frame_size_tuning,tcp_rcv_lowat", /*overwrite=*/0);
}

void AddCommonOptions(CLI::App& app, CommonOptions* options) {
  app.add_option("--http", options->http,
                 "host:port for /metrics, /healthz, /readyz, a shard's page; empty: none");
  app.add_option(
      "--http-token-file", options->http_token_file,
      "File with a token that readers of the HTTP port must give, as bearer or password; "
      "probes need none");
  app.add_option(
      "--tls-cert", options->tls.cert,
      "PEM certificate of this program, and what leads to a CA. With the next two: mutual "
      "TLS for gRPC, HTTPS for HTTP; replaced files are read again");
  app.add_option("--tls-key", options->tls.key, "PEM key of --tls-cert");
  app.add_option("--tls-ca", options->tls.ca, "PEM certificates of the CAs of sidecars and shards");
  app.add_option("--policy", options->policy,
                 "File that says which certificates may take part in which jobs, with quotas; it "
                 "needs TLS, and is read again when it changes; empty: everybody in every job");
  app.add_option("--cpus", options->cpus, "Cores to run on, e.g. 0-3,8; empty: all");
  // CLI11 applies the transform that is added last before the others.
  app.add_option("--memory-limit", options->memory_limit,
                 "Memory that the jobs of this process's shard may use; auto: half of what the "
                 "process may")
      ->envname("THALWEG_MEMORY_LIMIT")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->transform(Auto())
      ->transform(NoZero())
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 62))  // negative numbers wrap around
      ->check(WhyNoMemoryLimit)
      ->type_name("auto|BYTES[K|M|G]");
  app.add_option("--drain-seconds", options->drain_seconds,
                 "How long SIGTERM lets running jobs finish")
      ->check(Seconds(kMostDrainSeconds));

  app.set_version_flag("--version", std::string("thalweg ") + THALWEG_VERSION);
  app.add_flag_callback(
      "--list-env",
      [] {
        nlohmann::ordered_json vars;
        for (const EnvVar& var : KnownEnvVars()) vars[var.name] = var.default_value;
        std::cout << vars.dump(2) << std::endl;
        throw CLI::Success();
      },
      "Print every THALWEG_* environment variable with its default, as JSON");
  app.add_option("--ready-fd", options->ready_fd,
                 "File descriptor that gets one JSON line with the addresses once serving, or with "
                 "the error");
  std::string footer = "Environment:\n";
  for (const EnvVar& var : KnownEnvVars()) {
    footer += std::string("  ") + var.name + "  " + var.help + "\n";
  }
  app.footer(footer);
}

void AddAutoOption(CLI::App& app, const std::string& name, const char* env, uint32_t most,
                   uint32_t* value, const std::string& help) {
  app.add_option(name, *value, help)
      ->envname(env)
      ->transform(Auto())
      ->transform(NoZero())
      ->check(CLI::Range(0u, most))
      ->type_name(absl::StrCat("auto|1…", most));
}

std::optional<int> Parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kWrongArguments;
  }
  return std::nullopt;
}

uint64_t MemoryOf(const CommonOptions& options) {
  return options.memory_limit != 0 ? options.memory_limit : MemoryLimit() / 2;
}

uint32_t DefaultThreads() { return std::clamp(std::thread::hardware_concurrency() / 8, 1u, 4u); }

absl::Status ApplyCommonOptions(const CommonOptions& options) {
  RaiseDescriptorLimit();
  THALWEG_RETURN_IF_ERROR(RestrictToCpus(options.cpus));
  const std::string capability = GetEnv("THALWEG_CPU_CAPABILITY");
  THALWEG_RETURN_IF_ERROR(LimitCpuCapability(capability));
  if (!capability.empty()) {
    spdlog::warn("THALWEG_CPU_CAPABILITY={}: the kernels use {}", capability, CpuCapability());
  }
  THALWEG_RETURN_IF_ERROR(CheckTlsFiles(options.tls));
  if (!options.policy.empty() && !options.tls.enabled()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the policy '", options.policy,
        "' needs TLS, because it goes by certificates: give --tls-cert, --tls-key and --tls-ca"));
  }
  return OpenPolicy(options).status();
}

absl::StatusOr<std::unique_ptr<PolicyFile>> OpenPolicy(const CommonOptions& options) {
  if (options.policy.empty()) return nullptr;
  return PolicyFile::Open(options.policy);
}

PolicySource SourceOf(const PolicyFile* file) {
  if (file == nullptr) return nullptr;
  return [file] { return file->Current(); };
}

double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void ExportProcessInfo(MetricRegistry& registry, const std::string& name) {
  registry
      .GetGauge("thalweg_build_info", "1; which program this is, and of which version",
                {{"program", name}, {"version", THALWEG_VERSION}})
      .Set(1);
  registry.GetGauge("process_start_time_seconds", "When the process began, in Unix time")
      .Set(UnixSeconds());
}

void AnnounceReady(int fd, const std::string& address, const std::string& http) {
  Announce(fd, nlohmann::json::object({{"address", address}, {"http", http}}));
}

int ExitCode(const absl::Status& ended, int fd) {
  if (ended.ok()) return 0;
  spdlog::error("{}", Text(ended));
  Announce(fd, nlohmann::json::object({{"error", std::string(ended.message())}}));
  return absl::IsInvalidArgument(ended) ? kWrongArguments : 1;
}

}  // namespace thalweg
