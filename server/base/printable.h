// This header checks and prepares text from other processes before it is logged, kept or passed on.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace thalweg {

// A text is printable if it is UTF-8 without characters that move the cursor or reorder what is
// shown: controls (newlines and escapes are among them), separators of lines, changes of direction.
bool IsPrintable(absl::string_view text);

// Returns `text` with an escape such as "\n" or "\x1b" for each byte that is not part of something
// printable, and cut to `max_bytes` ≥ 4, "..." included. Text that has been prepared stays the
// same.
std::string Printable(absl::string_view text, size_t max_bytes);

// Returns OK if `name` is printable and has 1 to kMaxNameBytes (protocol.h); otherwise
// InvalidArgument that quotes its beginning, calls it `what` ("job name") and says what was
// expected.
absl::Status CheckName(absl::string_view what, absl::string_view name);

}  // namespace thalweg
