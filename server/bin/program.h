// What the two server programs share: signals, the ready line, and options that only print.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/metrics.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Blocks SIGTERM and SIGINT in this thread and those it starts, so that Signals::Wait sees them.
// First thing in main, before any thread.
class Signals {
 public:
  Signals();
  // True when a signal has come, after at most `patience`.
  bool Wait(Duration patience);
  // Whether this program takes new work: Unavailable once Wait() has returned true. From any
  // thread.
  absl::Status Ready() const;

 private:
  std::atomic<bool> has_come_ = false;
};

// Settings of the C library and of gRPC that the data plane wants. Before any thread and any use of
// gRPC; what the user has set in the environment wins.
void PrepareProcess();

// Options of both programs. --version and --list-env (a JSON object name → default, of every
// THALWEG_* variable) print and exit.
struct CommonOptions {
  std::string http = GetEnv("THALWEG_HTTP");
  std::string http_token_file = GetEnv("THALWEG_HTTP_TOKEN_FILE");
  TlsFiles tls{GetEnv("THALWEG_TLS_CERT"), GetEnv("THALWEG_TLS_KEY"), GetEnv("THALWEG_TLS_CA")};
  std::string cpus = GetEnv("THALWEG_CPUS");
  double drain_seconds = 30;
  int ready_fd = -1;
};
void AddCommonOptions(CLI::App& app, CommonOptions* options);

// An option that takes "auto" (read as 0) or a number from 1 to `most`, and has its default from
// the environment variable `env`; anything else is an error of the command line.
void AddAutoOption(CLI::App& app, const std::string& name, const char* env, uint32_t most,
                   uint32_t* value, const std::string& help);

// For an option of threads left to us. A core sums or folds at 2 GB/s and more: a few keep up with
// any network, and a sidecar's workers need the others.
uint32_t DefaultThreads();

// Keeps this process to the cores that were asked for ("0-3,8"), those of all threads started later
// included, and checks the TLS files. InvalidArgument says what is wrong.
absl::Status ApplyCommonOptions(const CommonOptions& options);

// Exports thalweg_build_info of program `name` and process_start_time_seconds.
void ExportProcessInfo(MetricRegistry& registry, const std::string& name);

// Writes one JSON line {"address": …, "http": …} to `fd`, if that is not negative, and closes it:
// whoever started this process knows now that it serves, and where.
void AnnounceReady(int fd, const std::string& address, const std::string& http);

}  // namespace thalweg
