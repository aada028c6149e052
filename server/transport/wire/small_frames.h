// This header parses the frames of exchange.proto that are not chunks, with protobuf. Those that
// encode them are declared in frame_codec.h.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg {

// Parses a frame that does not begin with a chunk. Returns InvalidArgument when it is not exactly
// one frame of one kind.
absl::StatusOr<ParsedFrame> ParseSmallFrame(const std::string& bytes);

}  // namespace thalweg
