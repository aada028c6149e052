// This header holds what both server programs use: signals, the ready line and common options.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/env.h"
#include "server/base/metrics.h"
#include "server/http/http_server.h"
#include "server/net/kept_tls_files.h"
#include "server/net/tls_files.h"
#include "server/page/site.h"
#include "server/policy/policy_file.h"

namespace thalweg {

inline constexpr Duration kSignalPoll = std::chrono::milliseconds(100);  // a signal is seen so late
inline constexpr Duration kStopGrace = std::chrono::seconds(2);  // for streams to send their last

// A Signals blocks SIGTERM and SIGINT in this thread and those it starts later, so that Wait sees
// them. Construct it first in main, before any thread.
class Signals {
 public:
  Signals();
  // Waits for a signal for at most `patience`; returns true when one has come.
  bool Wait(Duration patience);
  // Returns whether this program takes new work: Unavailable once Wait() has returned true.
  // Thread-safe.
  absl::Status Ready() const;

 private:
  std::atomic<bool> has_come_ = false;
};

// Applies the settings of Abseil and of gRPC that the data plane needs. Call before any
// thread starts and before any use of gRPC; values from the user's environment take precedence.
void PrepareProcess();

// CommonOptions are the options of both programs. --version and --list-env (a JSON object with name
// → default of every THALWEG_* variable) print and exit.
struct CommonOptions {
  std::string http = GetEnv("THALWEG_HTTP");
  std::string http_token_file = GetEnv("THALWEG_HTTP_TOKEN_FILE");
  TlsFiles tls{GetEnv("THALWEG_TLS_CERT"), GetEnv("THALWEG_TLS_KEY"), GetEnv("THALWEG_TLS_CA")};
  std::string policy = GetEnv("THALWEG_POLICY");
  std::string cpus = GetEnv("THALWEG_CPUS");
  uint64_t memory_limit = 0;  // bytes that the jobs of this process's shard may use; see MemoryOf
  double drain_seconds = 30;
  int ready_fd = -1;
};
void AddCommonOptions(CLI::App& app, CommonOptions* options);

inline constexpr int kWrongArguments = 2;  // exit code, also for wrong variables
// Reads the command line. Returns the exit code if the program is to end: 0 after --help and the
// like, kWrongArguments after an error, which it prints.
std::optional<int> Parse(CLI::App& app, int argc, char** argv);

inline constexpr double kMostTimeout = 86400;  // seconds, as in the client
// Reads a number of seconds. InvalidArgument: it is no number, or not from 0 to `most`.
absl::Status ParseSeconds(const std::string& text, double most, double* seconds);
// Lets an option take such a number only.
CLI::Validator Seconds(double most);

// Returns memory_limit, or if that is 0, half of what this process may use
// (server/base/memory_limit). gRPC may hold as much of what arrives, and both fit into what the
// process may use.
uint64_t MemoryOf(const CommonOptions& options);

// Adds an option that takes "auto" (stored as 0) or a number from 1 to `most`, with its default
// from the environment variable `env`; anything else is an error of the command line.
void AddAutoOption(CLI::App& app, const std::string& name, const char* env, uint32_t most,
                   uint32_t* value, const std::string& help);

// Returns the number of threads for an option set to "auto". A core sums or folds at 2 GB/s and
// more: a few threads keep up with any network, and a sidecar's workers need the other cores.
uint32_t DefaultThreads();

// Restricts this process, including all threads started later, to the requested cores ("0-3,8"),
// limits its kernels to THALWEG_CPU_CAPABILITY, and checks the TLS files and the policy. Call it
// before any kernel runs. InvalidArgument describes the error.
absl::Status ApplyCommonOptions(const CommonOptions& options);

// Opens the policy that the options name; null if they name none.
absl::StatusOr<std::unique_ptr<PolicyFile>> OpenPolicy(const CommonOptions& options);
// Returns what gives an aggregator the policy of `file`, which must outlive it; null without one.
PolicySource SourceOf(const PolicyFile* file);

// Reads files again that have changed; call it every now and then. `policy` may be null.
void Refresh(PolicyFile* policy, KeptTlsFiles& tls);

// Serves metrics, probes and `site` as the options say; null if they name no address. Everything
// must outlive the server. Errors are HttpServer::Start's.
absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(const CommonOptions& options,
                                                      const TlsFiles& tls, MetricRegistry& registry,
                                                      const Signals& signals, const Site& site);

// Returns the wall clock's time in seconds since 1970.
double UnixSeconds();

// Exports thalweg_build_info for program `name`, and process_start_time_seconds.
void ExportProcessInfo(MetricRegistry& registry, const std::string& name);

// Writes one JSON line {"address": …, "http": …} to `fd`, unless it is negative, and closes it. The
// line tells the parent process that this process serves, and where.
void AnnounceReady(int fd, const std::string& address, const std::string& http);

// Returns the exit code for how a program has ended: kWrongArguments for InvalidArgument, 1 for
// other errors. It logs an error, which comes before AnnounceReady, and writes it as the line
// {"error": …} to `fd` in its place.
int ExitCode(const absl::Status& ended, int fd);

}  // namespace thalweg
