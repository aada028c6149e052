// OnePartCodec is the base of codecs that send one part, whose results are complete once decoded.
#pragma once

#include <cstdint>
#include <utility>

#include "server/sidecar/codec/bucket_codec.h"

namespace thalweg {

class OnePartCodec : public BucketCodec {
 public:
  Part* FindPart(uint32_t number) final {
    return number == part_.bucket.id.part ? &part_ : nullptr;
  }
  bool EndsWith(const Part& /*part*/) const final { return true; }
  absl::StatusOr<Part*> Next(FoldPool& /*pool*/, Gradient& /*gradient*/) final { return nullptr; }
  uint64_t nonfinite_elems() const override { return part_.nonfinite_elems; }

 protected:
  // The part has all tensors and their padding, in float32 where `wire` is lossy, else in the
  // bucket's type; and the bucket's update, if there is one.
  OnePartCodec(TensorSet tensors, const CodecPlace& place, uint32_t number, WireFormat wire)
      : BucketCodec(std::move(tensors), place),
        part_(MakePart(
            number,
            {IsDense(wire) ? tensors_.layout().dtype : DType::kFloat32, tensors_.PaddedTensors()},
            wire, tensors_.Bytes())) {
    if (place_.update) {
      part_.SetUpdate(*place_.update, place_.chunk_bytes, place_.num_shards);
    }
  }

  // Puts the weights that shards have sent for a chunk after an update where they belong in the
  // result, or adds to the weights there what these differ by. InvalidArgument as Decode.
  absl::Status DecodeWeights(const RoundResult& received) const;

  Part part_;
};

}  // namespace thalweg
