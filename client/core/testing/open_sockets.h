// For tests of what a forked child inherits.
#pragma once

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace thalweg {

// Returns how many sockets this process has open. Is safe between fork and exec.
inline int OpenSockets() {
  int count = 0;
  struct stat status;
  for (int fd = 0; fd < 1024; ++fd) {
    if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) ++count;
  }
  return count;
}

// Returns how many a child would have that is forked now.
inline int OpenSocketsOfChild() {
  const pid_t child = fork();
  if (child == 0) _exit(OpenSockets());
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

}  // namespace thalweg
