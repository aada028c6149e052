// This header has helpers for the tests of all kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/base/dtype.h"
#include "hwy/highway.h"
#include "kernels/cast/element.h"

namespace thalweg {

template <class Element>
inline constexpr DType kTypeOf = DType::kFloat32;
template <>
inline constexpr DType kTypeOf<Fp16> = DType::kFloat16;
template <>
inline constexpr DType kTypeOf<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kTypeOf<Fp64> = DType::kFloat64;

// A ForcedTarget makes the kernels run as on a processor that has only `target`, while it lives.
// Only one thread may use it.
class ForcedTarget {
 public:
  explicit ForcedTarget(int64_t target) { Use(target); }
  ~ForcedTarget() { Use(0); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;

 private:
  static void Use(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// A Buffer is an array that begins `misalignment` bytes after an aligned address and ends where its
// allocation does, so that AddressSanitizer sees an access one byte beyond it.
class Buffer {
 public:
  Buffer(size_t misalignment, size_t bytes)
      : misalignment_(misalignment), storage_(misalignment + bytes) {}
  Buffer(size_t misalignment, const std::vector<std::byte>& content)
      : Buffer(misalignment, content.size()) {
    if (!content.empty()) std::memcpy(Data(), content.data(), content.size());
  }

  std::byte* Data() { return storage_.data() + misalignment_; }
  std::vector<std::byte> Content() const {
    return {storage_.begin() + static_cast<ptrdiff_t>(misalignment_), storage_.end()};
  }

 private:
  size_t misalignment_;
  std::vector<std::byte> storage_;
};

inline constexpr std::array<size_t, 5> kMisalignments = {0, 1, 2, 3, 5};

// Returns sizes around every multiple of a vector that a kernel treats differently.
inline std::vector<size_t> TestSizes() {
  std::vector<size_t> sizes = {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 1000, 4097};
  for (size_t size = 15; size <= 33; ++size) sizes.push_back(size);
  return sizes;
}

// Returns zeros, the ends of the subnormal and normal ranges, infinities and NaNs, quiet and
// signalling.
template <class Element>
std::vector<typename Element::Bits> SpecialBits() {
  using Bits = typename Element::Bits;
  constexpr Bits kInfinity = Element::kInfinity;
  const Bits least_normal = static_cast<Bits>(kInfinity & (~kInfinity + 1));
  std::vector<Bits> result;
  for (Bits magnitude :
       {Bits{0}, Bits{1}, Bits{2}, Bits{3}, static_cast<Bits>(least_normal - 1), least_normal,
        static_cast<Bits>(kInfinity - 1), kInfinity, static_cast<Bits>(kInfinity + 1),
        Element::kNan, static_cast<Bits>(Element::kNan | 0x35), Element::kMagnitude}) {
    result.push_back(magnitude);
    result.push_back(static_cast<Bits>(~Element::kMagnitude | magnitude));
  }
  return result;
}

// Returns `elems` random elements around 1. About one in `special_every` is special or has any bit
// pattern; none when that is 0.
template <class Element>
std::vector<std::byte> RandomElements(size_t elems, unsigned special_every,
                                      std::mt19937_64& random) {
  using Bits = typename Element::Bits;
  const std::vector<Bits> special = SpecialBits<Element>();
  std::normal_distribution<double> normal;
  std::vector<std::byte> result(elems * sizeof(Bits));
  for (size_t i = 0; i < elems; ++i) {
    Bits bits = Element::Narrow(static_cast<typename Element::Accumulator>(normal(random)));
    if (special_every != 0 && random() % special_every == 0) {
      bits = random() % 2 == 0 ? special[random() % special.size()] : static_cast<Bits>(random());
    }
    StoreBits<Element>(bits, result.data(), i);
  }
  return result;
}

}  // namespace thalweg
