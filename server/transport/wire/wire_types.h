// The wire types of protobuf's encoding, but for groups, which our messages do not have.
#pragma once

#include <cstdint>

namespace thalweg {

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

}  // namespace thalweg
