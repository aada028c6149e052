#include "absl/strings/str_cat.h"
#include "kernels/launch/emulator.h"
#include "kernels/launch/status.h"

namespace thalweg {

absl::Status LaunchStatus(LaunchError error, absl::string_view what) {
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", Emulator::Get().error()));
}

}  // namespace thalweg
