// This header converts what control.proto says of updates to and from the types of core/base, as
// control_codec.h does the rest.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/base/snapshots.h"
#include "core/base/update.h"
#include "thalweg/v1/control.pb.h"

namespace thalweg {

v1::UpdateRule ToProto(const UpdateRule& rule);
v1::SetSettingsRequest ToProto(uint64_t number, const UpdateStep& step);  // without the token
v1::SnapshotsRequest ToProto(const SnapshotCall& call);                   // without the token
v1::SnapshotsResponse ToProto(const SnapshotReport& report);

absl::StatusOr<UpdateRule> FromProto(const v1::UpdateRule& proto);
absl::StatusOr<UpdateStep> FromProto(const v1::SetSettingsRequest& proto);
absl::StatusOr<SnapshotCall> FromProto(const v1::SnapshotsRequest& proto);
absl::StatusOr<SnapshotReport> FromProto(const v1::SnapshotsResponse& proto);

}  // namespace thalweg
