// CheckSameJob compares what two nodes say about their job. It is a pure function.
#pragma once

#include "absl/status/status.h"
#include "core/exchange/join.h"

namespace thalweg {

// Returns OK when `request` describes the job that `first` does, as JoinRequest says; otherwise
// InvalidArgument that names what differs, both values and both nodes. Of the rounds of a job that
// goes on, it is enough for `first` to say that there are any.
absl::Status CheckSameJob(const JoinRequest& first, const JoinRequest& request);

}  // namespace thalweg
