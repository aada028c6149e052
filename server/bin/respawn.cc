#include "server/bin/respawn.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/base/clock.h"

namespace thalweg {
namespace {

// Children that are killed sooner, so many in a row, would be killed again.
constexpr Duration kShortLife = std::chrono::seconds(1);
constexpr int kMostShortLives = 5;

sigset_t AwaitedSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signum : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&set, signum);
  return set;
}

// Waits for the end of the child and returns how it was. Passes on signals that ask it to end, and
// sets `asked` then.
int AwaitChild(pid_t child, bool* asked) {
  const sigset_t set = AwaitedSignals();
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    const int signum = sigwaitinfo(&set, nullptr);
    if (signum != SIGTERM && signum != SIGINT) continue;
    *asked = true;
    kill(child, signum);
  }
  return status;
}

// Prepares the child: it ends with its parent, and gets signals from nobody else.
void BecomeChild(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // the parent has ended before
  setpgid(0, 0);
  sigset_t only_here;
  sigemptyset(&only_here);
  sigaddset(&only_here, SIGCHLD);
  sigprocmask(SIG_UNBLOCK, &only_here, nullptr);
}

}  // namespace

KeptAddresses::KeptAddresses()
    : shared_(static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  if (shared_ == MAP_FAILED) std::abort();  // not even a page of memory
}

void KeptAddresses::Keep(const std::string& shard, const std::string& http) {
  if (shard.size() < sizeof(Shared::shard)) std::strcpy(shared_->shard, shard.c_str());
  if (http.size() < sizeof(Shared::http)) std::strcpy(shared_->http, http.c_str());
  shared_->has_served = true;
}

std::optional<int> Respawn(const std::string& program, int* ready_fd) {
  const sigset_t set = AwaitedSignals();
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGCHLD, SIG_DFL);  // whoever started this may ignore it, which would hide children's ends
  const pid_t parent = getpid();
  int short_lives = 0;
  while (true) {
    const TimePoint start = Now();
    const pid_t child = fork();
    if (child < 0) {
      spdlog::error("no process for {}: {}", program, strerror(errno));
      return 1;
    }
    if (child == 0) {
      BecomeChild(parent);
      return std::nullopt;
    }
    if (*ready_fd >= 0) close(std::exchange(*ready_fd, -1));
    bool asked = false;
    const int status = AwaitChild(child, &asked);
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    const char* const name = strsignal(WTERMSIG(status));
    short_lives = Now() - start < kShortLife ? short_lives + 1 : 0;
    if (asked || short_lives == kMostShortLives) {
      spdlog::error("{} (process {}) was killed: {}", program, child, name);
      return 128 + WTERMSIG(status);
    }
    spdlog::warn("{} (process {}) was killed: {}; starting another one", program, child, name);
  }
}

}  // namespace thalweg
