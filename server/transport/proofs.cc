#include "server/transport/proofs.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/identity/job_key.h"
#include "server/transport/wire/status_codec.h"

namespace thalweg {
namespace {

absl::Status NotProved(const std::string& who) {
  return absl::PermissionDeniedError(absl::StrCat(
      who,
      " has not proved that it knows the secret of the job that it names: all nodes of a job "
      "need the secret that its first rank has drawn"));
}

}  // namespace

// The first line keeps the two kinds of statements apart. A job's name may contain anything, so it
// comes last.
std::string JoinStatement(const v1::JoinRequest& request) {
  return absl::StrCat("thalweg.v1.Join\n", absl::BytesToHexString(request.nonce()), "\n",
                      request.node(), "\n", request.shard(), "\n", request.job());
}

std::string StreamStatement(const OpenFrame& open) {
  return absl::StrCat("thalweg.v1.Stream\n", open.token, "\n", open.stream, "\n", open.num_streams,
                      "\n", open.incarnation);
}

absl::Status CheckProof(const v1::JoinRequest& request, Challenges& challenges, TimePoint now) {
  if (request.identity().empty()) return absl::OkStatus();
  const std::string who = absl::StrCat("node ", request.node());
  if (!Verify(request.identity(), JoinStatement(request), request.proof())) return NotProved(who);
  return Prefixed(absl::StrCat("the proof of ", who, " does not count, try again"),
                  challenges.Spend(request.nonce(), now));
}

absl::Status CheckProof(const OpenFrame& open) {
  if (open.identity.empty()) return absl::OkStatus();
  if (Verify(open.identity, StreamStatement(open), open.proof)) return absl::OkStatus();
  return NotProved("the stream's node");
}

}  // namespace thalweg
