// Respawn lets a server program run in a child process, which is started again when it is killed.
//
//   main ── parent: waits, passes SIGTERM and SIGINT on ─────────────▶ exits as its last child does
//             └─ child: serves ── killed      └─ next child: serves at the same addresses
#pragma once

#include <optional>
#include <string>

namespace thalweg {

// Addresses that the next child is to have, too. They are in memory that parent and children share.
class KeptAddresses {
 public:
  KeptAddresses();

  // Both are empty in the first child.
  std::string shard() const { return shared_->shard; }
  std::string http() const { return shared_->http; }
  // Says whether a child has served before this one does.
  bool has_served() const { return shared_->has_served; }
  // This child serves. Both have at most 255 bytes; longer ones are not kept.
  void Keep(const std::string& shard, const std::string& http);

 private:
  struct Shared {
    bool has_served;
    char shard[256];
    char http[256];
  };
  Shared* shared_;  // until the process ends
};

// Starts a child, and another one whenever that is killed by a signal, unless five in a row were
// in their first second. Returns nothing in a child, and in the parent, which must have no threads
// and has blocked SIGTERM and SIGINT, the exit code when there will be no other. The first child
// may announce itself on `ready_fd`, unless negative, which the parent closes; the others find it
// to be -1.
std::optional<int> Respawn(const std::string& program, int* ready_fd);

}  // namespace thalweg
