// Gradients that cross the network as elements of one type.
#pragma once

#include <memory>
#include <string>

#include "server/sidecar/codec/one_part_codec.h"

namespace thalweg {

class CastCodec final : public OnePartCodec {
 public:
  // Sends the tensors as part `number`, in `wire` type. `is_direct`: they are the whole bucket, and
  // what the node's only worker puts into its arena is in wire type already.
  CastCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, DType wire,
            bool is_direct);

  std::string name() const override { return Name(wire_); }
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;

  Part& part() { return part_; }
  const Part& part() const { return part_; }
  DType wire() const { return wire_; }
  // Puts the mean of a chunk of the whole bucket straight into the result, for a node that is
  // alone: rounded to wire type all the same, so that the numbers do not depend on where the shards
  // are. Counts what is not finite.
  absl::StatusOr<uint64_t> Reduce(uint32_t chunk, Gradient& gradient);

 private:
  const DType wire_;
  const bool is_direct_;
  std::unique_ptr<std::byte[]> encoded_;  // from the first round on, unless is_direct_
};

}  // namespace thalweg
