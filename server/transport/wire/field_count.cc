#include "server/transport/wire/field_count.h"

#include <limits>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/transport/wire/wire_types.h"

namespace thalweg {
namespace {

using google::protobuf::io::CodedInputStream;

// Skips the field that follows its tag; returns false if it is cut off or of another type.
bool SkipField(CodedInputStream& input, uint32_t tag) {
  uint64_t varint = 0;
  uint32_t length = 0;
  switch (tag & 7) {
    case kVarint:
      return input.ReadVarint64(&varint);
    case kFixed64:
      return input.Skip(8);
    case kLengthDelimited:
      return input.ReadVarint32(&length) && length <= std::numeric_limits<int>::max() &&
             input.Skip(static_cast<int>(length));
    case kFixed32:
      return input.Skip(4);
    default:
      return false;
  }
}

}  // namespace

bool HasAtMostFields(const grpc::ByteBuffer& message, uint64_t limit) {
  grpc::ByteBuffer copy(message);  // shares the bytes; the reader wants one that it may change
  grpc::ProtoBufferReader reader(&copy);
  if (!reader.status().ok()) return false;
  CodedInputStream input(&reader);
  for (uint64_t count = 0; const uint32_t tag = input.ReadTag(); ++count) {
    if (count == limit || !SkipField(input, tag)) return false;
  }
  return input.ConsumedEntireMessage();
}

}  // namespace thalweg
