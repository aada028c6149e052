#include "kernels/reduce/fold_elements.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <vector>

#include "kernels/cast/element.h"
#include "kernels/reduce/fold_scalar.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

// These stay in the cache while all inputs are folded into them; the loops over them vectorise.
constexpr size_t kBlockElems = 512;

// A comparison with NaN is false, and NaN differs from itself: either one goes on.
struct Min {
  template <class T>
  static T Of(T so_far, T next) {
    return next < so_far || next != next ? next : so_far;
  }
};

struct Max {
  template <class T>
  static T Of(T so_far, T next) {
    return next > so_far || next != next ? next : so_far;
  }
};

struct Product {
  template <class T>
  static T Of(T so_far, T next) {
    return so_far * next;
  }
};

template <class Operation, class Element>
uint64_t FoldAs(std::span<const void* const> inputs, void* out, size_t elems) {
  using Accumulator = typename Element::Accumulator;
  std::array<Accumulator, kBlockElems> block;
  uint64_t nonfinite = 0;
  for (size_t begin = 0; begin < elems; begin += kBlockElems) {
    const size_t count = std::min(kBlockElems, elems - begin);
    for (size_t i = 0; i < count; ++i) {
      block[i] = Element::Widen(LoadBits<Element>(inputs[0], begin + i));
    }
    for (const void* input : inputs.subspan(1)) {
      for (size_t i = 0; i < count; ++i) {
        block[i] = Operation::Of(block[i],
                                 Accumulator{Element::Widen(LoadBits<Element>(input, begin + i))});
      }
    }
    for (size_t i = 0; i < count; ++i) {
      const auto bits = SettleNaN<Element>(Element::Narrow(block[i]));
      StoreBits<Element>(bits, out, begin + i);
      nonfinite += IsFinite<Element>(bits) ? 0 : 1;
    }
  }
  return nonfinite;
}

template <class Operation>
uint64_t FoldWith(std::span<const void* const> inputs, DType type, void* out, size_t elems) {
  switch (type) {
    case DType::kFloat32:
      return FoldAs<Operation, Fp32>(inputs, out, elems);
    case DType::kFloat16:
      return FoldAs<Operation, Fp16>(inputs, out, elems);
    case DType::kBFloat16:
      return FoldAs<Operation, BFloat16>(inputs, out, elems);
    case DType::kFloat64:
      return FoldAs<Operation, Fp64>(inputs, out, elems);
    default:
      return 0;  // FoldIntegers
  }
}

// Int is the type of the elements. Unsigned arithmetic gives the same bits and wraps around.
template <class Int, class Operation>
void FoldIntegersWith(std::span<const void* const> inputs, void* out, size_t elems,
                      Operation operation) {
  std::array<Int, kBlockElems> block;
  std::array<Int, kBlockElems> next;
  for (size_t begin = 0; begin < elems; begin += kBlockElems) {
    const size_t count = std::min(kBlockElems, elems - begin);
    const size_t at = begin * sizeof(Int), bytes = count * sizeof(Int);
    std::memcpy(block.data(), static_cast<const std::byte*>(inputs[0]) + at, bytes);
    for (const void* input : inputs.subspan(1)) {
      std::memcpy(next.data(), static_cast<const std::byte*>(input) + at, bytes);
      for (size_t i = 0; i < count; ++i) {
        block[i] = static_cast<Int>(operation(block[i], next[i]));
      }
    }
    std::memcpy(static_cast<std::byte*>(out) + at, block.data(), bytes);
  }
}

template <class Int>
void FoldIntegers(Fold fold, std::span<const void* const> inputs, void* out, size_t elems) {
  const auto with = [&](auto operation) { FoldIntegersWith<Int>(inputs, out, elems, operation); };
  switch (fold) {
    case Fold::kMin:
      return with([](Int a, Int b) { return std::min(a, b); });
    case Fold::kMax:
      return with([](Int a, Int b) { return std::max(a, b); });
    case Fold::kProduct:
      return with([](Int a, Int b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); });
    case Fold::kBitAnd:
      return with([](Int a, Int b) { return a & b; });
    case Fold::kBitOr:
      return with([](Int a, Int b) { return a | b; });
    case Fold::kBitXor:
      return with([](Int a, Int b) { return a ^ b; });
    default:
      return with([](Int a, Int b) { return static_cast<uint64_t>(a) + static_cast<uint64_t>(b); });
  }
}

}  // namespace

uint64_t FoldElements(Fold fold, std::span<const void* const> inputs, DType type, void* out,
                      size_t elems) {
  assert(!inputs.empty() && IsUnweighted(fold));
  switch (type) {
    case DType::kUInt8:
      FoldIntegers<uint8_t>(fold, inputs, out, elems);
      return 0;
    case DType::kInt8:
      FoldIntegers<int8_t>(fold, inputs, out, elems);
      return 0;
    case DType::kInt16:
      FoldIntegers<int16_t>(fold, inputs, out, elems);
      return 0;
    case DType::kInt32:
      FoldIntegers<int32_t>(fold, inputs, out, elems);
      return 0;
    case DType::kInt64:
      FoldIntegers<int64_t>(fold, inputs, out, elems);
      return 0;
    default:
      break;
  }
  switch (fold) {
    case Fold::kMin:
      return FoldWith<Min>(inputs, type, out, elems);
    case Fold::kMax:
      return FoldWith<Max>(inputs, type, out, elems);
    case Fold::kProduct:
      return FoldWith<Product>(inputs, type, out, elems);
    default:
      // A multiplication by 1 changes nothing, and a fused one rounds as an addition does.
      return FoldMean(inputs, std::vector<float>(inputs.size(), 1.0f), 1.0f, type, type, out,
                      elems);
  }
}

}  // namespace thalweg
