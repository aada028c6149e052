#include "kernels/codec/block_codec.h"
#include "kernels/codec/int8/int8.h"

namespace thalweg {

const LossyKernels& Int8Kernels() {
  static constexpr BlockCodec kCodec(WireFormat::kInt8, &EncodeInt8, &DecodeInt8);
  return kCodec;
}

}  // namespace thalweg
