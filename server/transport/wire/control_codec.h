// This header converts messages of control.proto to and from the types of core/exchange.
// InvalidArgument refuses what the C++ type cannot hold; the shard checks what the values mean for
// the job. All functions are stateless.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/exchange/join.h"
#include "core/exchange/rounds.h"
#include "server/transport/wire/session_token.h"
#include "thalweg/v1/control.pb.h"

namespace thalweg {

v1::JoinRequest ToProto(const JoinRequest& request);
v1::JoinResponse ToProto(SessionToken token, const Terms& terms);
v1::RegisterBucketRequest ToProto(SessionToken token, const BucketAnnouncement& bucket);
v1::MakeGroupRequest ToProto(SessionToken token, const Group& group);
v1::BucketId ToProto(BucketId id);
// Encodes values of residuals and weights.
std::string FloatsToBytes(std::span<const float> values);

// Converts the request, except its identity, which counts only after CheckProof (proofs.h). Also
// refuses a caller that does not speak kWireVersion, and names both sides' versions.
absl::StatusOr<JoinRequest> FromProto(const v1::JoinRequest& proto);
absl::StatusOr<BucketAnnouncement> FromProto(const v1::RegisterBucketRequest& proto);
absl::StatusOr<Group> FromProto(const v1::MakeGroupRequest& proto);
// Converts all but the token, which it checks too.
absl::StatusOr<Terms> FromProto(const v1::JoinResponse& proto);
BucketId FromProto(const v1::BucketId& proto);
// Decodes floats; refuses bytes that are not a whole number of them.
absl::StatusOr<std::vector<float>> FloatsFromBytes(const std::string& bytes);

}  // namespace thalweg
