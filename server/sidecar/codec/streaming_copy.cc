#include "server/sidecar/codec/streaming_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace thalweg {

void StreamingCopy(std::span<const float> from, float* to) {
#ifdef __SSE2__                 // part of x86-64
  constexpr size_t kLine = 16;  // floats
  const size_t past = reinterpret_cast<uintptr_t>(to) / sizeof(float) % kLine;
  const size_t head = std::min(from.size(), (kLine - past) % kLine);
  to = std::copy_n(from.data(), head, to);
  from = from.subspan(head);
  for (; from.size() >= kLine; from = from.subspan(kLine), to += kLine) {
    for (size_t i = 0; i < kLine; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from.data() + i));
  }
  _mm_sfence();
#endif
  std::copy(from.begin(), from.end(), to);
}

}  // namespace thalweg
