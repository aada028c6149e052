#include "kernels/codec/block_codec.h"
#include "kernels/codec/onebit/onebit.h"

namespace thalweg {

const LossyKernels& OneBitKernels() {
  static constexpr BlockCodec kCodec(WireFormat::kOneBit, &EncodeOneBit, &DecodeOneBit);
  return kCodec;
}

}  // namespace thalweg
