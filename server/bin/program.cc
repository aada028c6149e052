#include "server/bin/program.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/base/env.h"

namespace thalweg {
namespace {

sigset_t HandledSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
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
  return sigtimedwait(&set, nullptr, &timeout) > 0;
}

void AddCommonOptions(CLI::App& app, int* ready_fd) {
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
  app.add_option("--ready-fd", *ready_fd,
                 "File descriptor that gets one JSON line with the addresses once serving");
  std::string footer = "Environment:\n";
  for (const EnvVar& var : KnownEnvVars()) {
    footer += std::string("  ") + var.name + "  " + var.help + "\n";
  }
  app.footer(footer);
}

void AnnounceReady(int fd, const std::string& address, const std::string& http) {
  if (fd < 0) return;
  const std::string line = nlohmann::json{{"address", address}, {"http", http}}.dump() + "\n";
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

}  // namespace thalweg
