// Proofs show a shard that a node knows its job's secret, which never travels: they are signatures
// by the key that the secret is (server/identity).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/identity/challenges.h"
#include "server/transport/wire/frame_codec.h"
#include "thalweg/v1/control.pb.h"

namespace thalweg {

// Both return what the node signs, which docs/wire.md describes. They do not read the proof.
std::string JoinStatement(const v1::JoinRequest& request);
std::string StreamStatement(const OpenFrame& open);

// Both return OK if the identity is empty or the proof is its key's signature of the statement, and
// PermissionDenied otherwise. The nonce of a proved Join is spent.
absl::Status CheckProof(const v1::JoinRequest& request, Challenges& challenges, TimePoint now);
absl::Status CheckProof(const OpenFrame& open);

}  // namespace thalweg
