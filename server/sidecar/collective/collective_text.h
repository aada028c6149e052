// This header says in words which collective a worker wants.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/collective_kind.h"
#include "core/base/dtype.h"
#include "core/base/fold.h"
#include "core/ipc/message.h"

namespace thalweg {

// Returns e.g. "allreduce 7 of group 'default'".
inline std::string NameOf(const ipc::Collect& spec, const std::string& group) {
  return absl::StrCat(Name(spec.kind), " ", spec.sequence, " of group '", group, "'");
}

// Returns e.g. "mean of 1024 elements of fp32"; the elements are those of one unit.
inline std::string TextOf(const ipc::Collect& spec) {
  return absl::StrCat(Folds(spec.kind) ? absl::StrCat(Name(spec.fold), " of ") : "", spec.elems,
                      " elements of ", Name(spec.dtype),
                      HasRoot(spec.kind) ? absl::StrCat(" at root ", spec.root) : "");
}

}  // namespace thalweg
