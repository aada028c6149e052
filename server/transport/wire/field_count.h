// This file bounds what parsing a message takes, before it is parsed.
#pragma once

#include <cstdint>

#include "grpcpp/grpcpp.h"

namespace thalweg {

// Returns false if the serialized message has more than `limit` fields at its top level, elements
// of repeated fields counted each, or if its fields cannot be told apart. Takes no memory: protobuf
// keeps some 70 bytes of an empty element that takes two on the wire.
bool HasAtMostFields(const grpc::ByteBuffer& message, uint64_t limit);

}  // namespace thalweg
