// This header lets threads of the optimizers' kernels read and write arrays four elements at a
// time, of types that are known only at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/launch/pack.h"
#include "kernels/optim/optim_launch.h"
#include "kernels/optim/place.h"

namespace thalweg {

// Calls visit.operator()<Element>() for an element type.
template <class Visit>
THALWEG_DEVICE inline void WithElement(ElementType type, const Visit& visit) {
  if (type == ElementType::kFp32) {
    visit.template operator()<Fp32>();
  } else if (type == ElementType::kFp16) {
    visit.template operator()<Fp16>();
  } else {
    visit.template operator()<BFloat16>();
  }
}

// Returns where an element of an array lies.
THALWEG_DEVICE inline const void* ElementAt(const void* array, ElementType type, uint64_t number) {
  const uint64_t bytes = type == ElementType::kFp32 ? 4 : 2;
  return static_cast<const std::byte*>(array) + number * bytes;
}

// Reads and writes a number of 2 or 4 bytes, where the lanes of a warp together have whole sectors.
template <class T>
THALWEG_DEVICE inline T LoadOne(const T* from) {
#if !defined(__CUDACC__)
  NoteAccess(from, sizeof(T), false);
#endif
  return *from;
}

template <class T>
THALWEG_DEVICE inline void StoreOne(T value, T* to) {
#if !defined(__CUDACC__)
  NoteAccess(to, sizeof(T), true);
#endif
  *to = value;
}

// A Quad holds the elements as they were read: for a packed place of 16 bits, two in each of two
// words; else one in each. Widen() is separate, so that reads of several arrays are in flight
// together.
struct Quad {
  uint32_t words[kQuad];
};

template <bool kPacked>
THALWEG_DEVICE inline Quad Load(const void* array, ElementType type, const ElementPlace& place) {
  Quad quad = {};
  if constexpr (kPacked) {
    if (type == ElementType::kFp32) {
      const Bytes16 loaded = Load16(static_cast<const uint32_t*>(array) + place.first);
      for (int w = 0; w < 4; ++w) quad.words[w] = loaded.words[w];
    } else {
      const Bytes8 loaded = Load8(static_cast<const uint16_t*>(array) + place.first);
      for (int w = 0; w < 2; ++w) quad.words[w] = loaded.words[w];
    }
  } else {
    for (uint32_t e = 0; e < kQuad; ++e) {
      if (e >= place.count) continue;
      quad.words[e] = type == ElementType::kFp32 ? static_cast<const uint32_t*>(array)[place.At(e)]
                                                 : static_cast<const uint16_t*>(array)[place.At(e)];
    }
  }
  return quad;
}

template <bool kPacked>
THALWEG_DEVICE inline uint16_t HalfOf(const Quad& quad, uint32_t e) {
  return static_cast<uint16_t>(kPacked ? quad.words[e / 2] >> (e % 2 * 16) : quad.words[e]);
}

template <bool kPacked>
THALWEG_DEVICE inline void Widen(const Quad& quad, ElementType type, float* values) {
  if (type == ElementType::kFp32) {
    for (uint32_t e = 0; e < kQuad; ++e) values[e] = Fp32::Widen(quad.words[e]);
  } else if (type == ElementType::kFp16) {
    for (uint32_t e = 0; e < kQuad; ++e) values[e] = Fp16::Widen(HalfOf<kPacked>(quad, e));
  } else {
    for (uint32_t e = 0; e < kQuad; ++e) values[e] = BFloat16::Widen(HalfOf<kPacked>(quad, e));
  }
}

THALWEG_DEVICE inline uint32_t NarrowTo(ElementType type, float value) {
  if (type == ElementType::kFp32) return Fp32::Narrow(value);
  return type == ElementType::kFp16 ? Fp16::Narrow(value) : BFloat16::Narrow(value);
}

template <bool kPacked>
THALWEG_DEVICE inline void Store(const float* values, ElementType type, const ElementPlace& place,
                                 void* array) {
  uint32_t bits[kQuad];
  for (uint32_t e = 0; e < kQuad; ++e) bits[e] = NarrowTo(type, values[e]);
  if constexpr (kPacked) {
    if (type == ElementType::kFp32) {
      Store16({{bits[0], bits[1], bits[2], bits[3]}}, static_cast<uint32_t*>(array) + place.first);
    } else {
      Store8({{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16}},
             static_cast<uint16_t*>(array) + place.first);
    }
  } else {
    for (uint32_t e = 0; e < kQuad; ++e) {
      if (e >= place.count) continue;
      if (type == ElementType::kFp32) {
        static_cast<uint32_t*>(array)[place.At(e)] = bits[e];
      } else {
        static_cast<uint16_t*>(array)[place.At(e)] = static_cast<uint16_t>(bits[e]);
      }
    }
  }
}

// Stores the new values of parameters, and of their copy if there is one.
template <bool kPacked>
THALWEG_DEVICE inline void StoreParams(const OptimEntry& tensor, const float* values,
                                       const ElementPlace& place) {
  Store<kPacked>(values, tensor.param_type, place, tensor.param);
  if (tensor.copy != nullptr) Store<kPacked>(values, tensor.copy_type, place, tensor.copy);
}

}  // namespace thalweg
