// This header implements the wire format topk on a GPU, with the contract and the bits of
// kernels/codec/topk/topk.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/codec/encoded.h"
#include "kernels/launch/stream.h"

namespace thalweg {

// Returns how many bytes of device memory EncodeTopKOnDevice() needs beside its arguments: about 6
// for each element; it accesses few of them when few elements are sent.
uint64_t TopKScratchBytes(uint64_t elems);

// Queues on `stream` what EncodeTopK() does, for arrays in device memory: writes the same bytes to
// `out`, which has room for MaxEncodedBytes(kTopK, elems), and sets `*encoded`. Everything is
// chosen and encoded on the device and nothing waits; the caller reads the number of bytes from
// `*encoded`. It takes eight launches and a fill; `values` and `residual` are read twice,
// `residual` is written once. `values` and `residual` must be aligned to their elements, `scratch`,
// of at least TopKScratchBytes(elems), and `encoded` to 8 bytes; `out` may lie at any address. Work
// queued later on the same stream may use `scratch` again. Returns InvalidArgument when elems >
// kMaxLossyElems or count is 0; Internal when CUDA cannot launch. Thread-safe.
absl::Status EncodeTopKOnDevice(CudaStream stream, const float* values, float* residual,
                                uint64_t elems, uint64_t count, std::byte* out, Encoded* encoded,
                                void* scratch);

// Queues on `stream`: sets all `elems` elements of `out` to 0, and those with the given indices to
// the given values. All pointers are to device memory. It decodes a topk payload whose entries the
// host has read (TopKEntries): the payload comes from the network, so the host must check every
// byte anyway, and an entry's position is known only after reading the previous one. Requires that
// indices differ and are below `elems`. Returns Internal when CUDA cannot launch. Thread-safe.
absl::Status ScatterTopKOnDevice(CudaStream stream, const uint32_t* indices, const float* values,
                                 uint64_t count, float* out, uint64_t elems);

}  // namespace thalweg
