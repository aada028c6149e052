// Messages of control.proto to and from the types of core/base/exchange.h. What comes from the
// network is refused with InvalidArgument when the C++ type cannot hold it; what it means for the
// job is the shard's business. Stateless.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/exchange.h"
#include "thalweg/v1/control.pb.h"

namespace thalweg {

v1::JoinRequest ToProto(const JoinRequest& request);
v1::JoinResponse ToProto(const Membership& membership);
v1::RegisterBucketRequest ToProto(SessionToken token, const BucketAnnouncement& bucket);
v1::BucketId ToProto(BucketId id);
// The bytes of ReadResidualResponse and WriteResidualRequest.
std::string FloatsToBytes(std::span<const float> values);

// Also refuses a caller that does not speak kWireVersion, naming its versions and ours.
absl::StatusOr<JoinRequest> FromProto(const v1::JoinRequest& proto);
absl::StatusOr<BucketAnnouncement> FromProto(const v1::RegisterBucketRequest& proto);
absl::StatusOr<Membership> FromProto(const v1::JoinResponse& proto);
BucketId FromProto(const v1::BucketId& proto);
// Refuses bytes that are not whole floats.
absl::StatusOr<std::vector<float>> FloatsFromBytes(const std::string& bytes);

}  // namespace thalweg
