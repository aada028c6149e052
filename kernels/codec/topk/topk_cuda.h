// The wire format topk on a GPU: the contract of kernels/codec/topk/topk.h, and its bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/codec/encoded.h"
#include "kernels/cuda/stream.h"

namespace thalweg {

// How many bytes of device memory EncodeTopKOnDevice() needs beside its arguments: about 6 for each
// element, of which it touches few when few elements cross.
uint64_t TopKScratchBytes(uint64_t elems);

// Queues on `stream` what EncodeTopK() does, for arrays in device memory: writes the same bytes to
// `out`, which has room for MaxEncodedBytes(kTopK, elems), and sets `*encoded`. Everything is
// chosen and coded on the device; nothing waits, so how many bytes there are the caller reads with
// `*encoded`. Eight launches and a fill; `values` and `residual` are read twice, `residual` is
// written once.
// `values` and `residual` must be aligned to their elements, `scratch`, of at least
// TopKScratchBytes(elems), and `encoded` to 8 bytes; `out` may lie at any address. `scratch` may be
// used again by what is queued later on the same stream.
// InvalidArgument when elems > kMaxLossyElems or count is 0; Internal when CUDA cannot launch.
// Thread-safe.
absl::Status EncodeTopKOnDevice(CudaStream stream, const float* values, float* residual,
                                uint64_t elems, uint64_t count, std::byte* out, Encoded* encoded,
                                void* scratch);

// Queues on `stream`: sets all `elems` elements of `out` to 0, and those with the given indices to
// the given values. All pointers are to device memory. Decodes a topk payload whose entries the
// host has read (TopKEntries): it comes from the network, so the host must check it byte by byte
// anyway, and where an entry begins is known only once the one before has been read.
// Requires that indices differ and are below `elems`. Internal when CUDA cannot launch.
// Thread-safe.
absl::Status ScatterTopKOnDevice(CudaStream stream, const uint32_t* indices, const float* values,
                                 uint64_t count, float* out, uint64_t elems);

}  // namespace thalweg
