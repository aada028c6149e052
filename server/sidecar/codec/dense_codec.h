// DenseCodec sends gradients as elements of one type.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "core/base/dtype.h"
#include "server/sidecar/codec/one_part_codec.h"

namespace thalweg {

class DenseCodec : public OnePartCodec {
 public:
  // Sends the tensors as part `number`, in `wire` type.
  DenseCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, DType wire)
      : OnePartCodec(std::move(tensors), place, number, FormatOf(wire)), wire_(wire) {}

  std::string name() const final { return Name(wire_); }
  Part& part() { return part_; }
  const Part& part() const { return part_; }
  DType wire() const { return wire_; }

  // Writes the mean of a chunk of the whole bucket directly into the result, on a node that is
  // alone. It is rounded to wire type all the same, so that the numbers do not depend on where the
  // shards are. Counts what is not finite.
  virtual absl::StatusOr<uint64_t> Reduce(uint32_t chunk, Gradient& gradient) = 0;

 protected:
  const DType wire_;
};

}  // namespace thalweg
