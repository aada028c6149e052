// This header lets threads of the optimizers' kernels read and write arrays eight elements at a
// time, of types that are known only at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cast/element.h"
#include "kernels/launch/pack.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {

inline constexpr uint32_t kEight = 8;

// A Place says which elements: when packed, eight from `first` on, at a multiple of 16 bytes in
// every array; else `count` elements at a distance of `stride`.
struct Place {
  uint64_t first;
  uint32_t stride;
  uint32_t count;

  THALWEG_DEVICE uint64_t At(uint32_t e) const { return first + uint64_t{stride} * e; }
};

// Calls visit.operator()<kPacked>(place) for the elements in [first, last) of thread `index` of
// `threads`; `first` is a multiple of kEight.
template <class Visit>
THALWEG_DEVICE inline void ForEachPlace(uint32_t index, uint32_t threads, uint8_t head,
                                        uint64_t first, uint64_t last, const Visit& visit) {
  const uint64_t elems = last - first;
  const uint64_t packs = head == kNoPacks || elems < head ? 0 : (elems - head) / kEight;
  for (uint64_t pack = index; pack < packs; pack += threads) {
    visit.template operator()<true>(Place{first + head + pack * kEight, 1, kEight});
  }
  // Where there are packs, fewer than 16 elements are left before and behind them.
  const uint64_t singles = elems - packs * kEight;
  for (uint64_t single = index; single < singles; single += uint64_t{threads} * kEight) {
    const uint64_t left = (singles - single + threads - 1) / threads;
    visit.template operator()<false>(Place{first + single + (single < head ? 0 : packs * kEight),
                                           threads,
                                           static_cast<uint32_t>(left < kEight ? left : kEight)});
  }
}

// An Eight holds the elements as they were read: for a packed place of 16 bits, two in each of four
// words; else one in each. Widen() is separate, so that reads of several arrays are in flight
// together.
struct Eight {
  uint32_t words[kEight];
};

template <bool kPacked>
THALWEG_DEVICE inline Eight Load(const void* array, ElementType type, const Place& place) {
  Eight eight = {};
  if constexpr (kPacked) {
    const uint64_t elem_bytes = type == ElementType::kFp32 ? 4 : 2;
    const std::byte* const from = static_cast<const std::byte*>(array) + place.first * elem_bytes;
    const Bytes16 low = Load16(from);
    for (int w = 0; w < 4; ++w) eight.words[w] = low.words[w];
    if (type == ElementType::kFp32) {
      const Bytes16 high = Load16(from + 16);
      for (int w = 0; w < 4; ++w) eight.words[4 + w] = high.words[w];
    }
  } else {
    for (uint32_t e = 0; e < kEight; ++e) {
      if (e >= place.count) continue;
      eight.words[e] = type == ElementType::kFp32
                           ? static_cast<const uint32_t*>(array)[place.At(e)]
                           : static_cast<const uint16_t*>(array)[place.At(e)];
    }
  }
  return eight;
}

template <bool kPacked>
THALWEG_DEVICE inline uint16_t HalfOf(const Eight& eight, uint32_t e) {
  return static_cast<uint16_t>(kPacked ? eight.words[e / 2] >> (e % 2 * 16) : eight.words[e]);
}

template <bool kPacked>
THALWEG_DEVICE inline void Widen(const Eight& eight, ElementType type, float* values) {
  if (type == ElementType::kFp32) {
    for (uint32_t e = 0; e < kEight; ++e) values[e] = Fp32::Widen(eight.words[e]);
  } else if (type == ElementType::kFp16) {
    for (uint32_t e = 0; e < kEight; ++e) values[e] = Fp16::Widen(HalfOf<kPacked>(eight, e));
  } else {
    for (uint32_t e = 0; e < kEight; ++e) values[e] = BFloat16::Widen(HalfOf<kPacked>(eight, e));
  }
}

THALWEG_DEVICE inline uint32_t NarrowTo(ElementType type, float value) {
  if (type == ElementType::kFp32) return Fp32::Narrow(value);
  return type == ElementType::kFp16 ? Fp16::Narrow(value) : BFloat16::Narrow(value);
}

template <bool kPacked>
THALWEG_DEVICE inline void Store(const float* values, ElementType type, const Place& place,
                                 void* array) {
  uint32_t bits[kEight];
  for (uint32_t e = 0; e < kEight; ++e) bits[e] = NarrowTo(type, values[e]);
  if constexpr (kPacked) {
    if (type == ElementType::kFp32) {
      std::byte* const to = static_cast<std::byte*>(array) + place.first * 4;
      Store16({{bits[0], bits[1], bits[2], bits[3]}}, to);
      Store16({{bits[4], bits[5], bits[6], bits[7]}}, to + 16);
    } else {
      Store16({{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                bits[6] | bits[7] << 16}},
              static_cast<std::byte*>(array) + place.first * 2);
    }
  } else {
    for (uint32_t e = 0; e < kEight; ++e) {
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
                                       const Place& place) {
  Store<kPacked>(values, tensor.param_type, place, tensor.param);
  if (tensor.copy != nullptr) Store<kPacked>(values, tensor.copy_type, place, tensor.copy);
}

}  // namespace thalweg
