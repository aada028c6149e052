#include "kernels/codec/topk/topk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cast/element.h"
#include "kernels/codec/topk/select.h"
#include "kernels/codec/topk/topk_scalar.h"

namespace thalweg {
namespace {

constexpr size_t kCountBytes = sizeof(uint32_t);

// A Writer writes a payload entry by entry.
class Writer {
 public:
  explicit Writer(std::byte* out) : out_(out), at_(out + kCountBytes) {}

  // Requires an index above that of the last entry.
  void Add(uint64_t index, float value) {
    at_ = PutEntry(index - next_, value, at_);
    next_ = index + 1;
    ++count_;
    if (!std::isfinite(value)) ++nonfinite_;
  }

  Encoded Finish() {
    StoreBits<Fp32>(count_, out_, 0);
    return {static_cast<uint64_t>(at_ - out_), nonfinite_};
  }

 private:
  std::byte* out_;
  std::byte* at_;
  uint64_t next_ = 0;
  uint32_t count_ = 0;
  uint64_t nonfinite_ = 0;
};

}  // namespace

uint64_t TopKCount(double ratio, uint64_t elems) {
  const double count = std::ceil(ratio * static_cast<double>(elems));
  return std::clamp<uint64_t>(static_cast<uint64_t>(count), 1, std::max<uint64_t>(elems, 1));
}

Encoded EncodeTopK(const float* values, Feedback feedback, uint64_t elems, uint64_t count,
                   std::byte* out) {
  std::vector<IndexedResidual> kept;
  const float* x = values;
  if (feedback) {
    kept = AddResidual(values, feedback, elems);
    x = feedback.next;
  }
  Writer writer(out);
  for (uint32_t i : SelectLargest(x, elems, count)) {
    writer.Add(i, x[i]);
    if (feedback) feedback.next[i] = 0;
  }
  for (const IndexedResidual& element : kept) {
    feedback.next[element.index] = element.residual;
  }
  return writer.Finish();
}

absl::Status CheckTopK(std::span<const std::byte> payload, uint64_t elems) {
  if (payload.size() < kCountBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a count of ", kCountBytes, " bytes, got ", payload.size()));
  }
  const uint32_t count = LoadBits<Fp32>(payload.data(), 0);
  size_t at = kCountBytes;
  uint64_t next = 0;  // the smallest possible index of the next entry
  for (uint32_t entry = 0; entry < count; ++entry) {
    const auto wrong = [&](const char* what) {
      return absl::InvalidArgumentError(absl::StrCat("entry ", entry, " of ", count, ": ", what,
                                                     " in a chunk of ", elems, " elements"));
    };
    uint64_t gap = 0;
    // Gaps below 2^32 take five bytes at most.
    for (int shift = 0;; shift += 7) {
      if (at == payload.size()) return wrong("the payload ends before it");
      const auto byte = std::to_integer<uint64_t>(payload[at++]);
      gap |= (byte & 0x7f) << shift;
      if (byte < 0x80) {
        if (byte == 0 && shift > 0) return wrong("its index is not in the shortest form");
        break;
      }
      if (shift == 28) return wrong("its index has more than five bytes");
    }
    if (next >= elems || gap >= elems - next) return wrong("its index is too large");
    next += gap + 1;
    if (payload.size() - at < sizeof(float)) return wrong("the payload ends in its value");
    at += sizeof(float);
  }
  if (at == payload.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", at, " bytes for ", count, " entries, got ", payload.size()));
}

TopKEntries::TopKEntries(std::span<const std::byte> payload)
    : at_(payload.data() + kCountBytes), left_(LoadBits<Fp32>(payload.data(), 0)) {
  if (left_ > 0) ReadGap();
}

float TopKEntries::value() const { return Fp32::Widen(LoadBits<Fp32>(at_, 0)); }

void TopKEntries::Next() {
  at_ += sizeof(float);
  ++index_;
  if (--left_ > 0) ReadGap();
}

void TopKEntries::ReadGap() {
  auto byte = std::to_integer<uint64_t>(*at_++);
  uint64_t gap = byte & 0x7f;
  for (int shift = 7; byte >= 0x80; shift += 7) {
    byte = std::to_integer<uint64_t>(*at_++);
    gap |= (byte & 0x7f) << shift;
  }
  index_ += gap;
}

Encoded FoldTopK(std::span<const std::span<const std::byte>> contributions,
                 const Weighting& weighting, uint64_t elems, std::byte* out) {
  // Sums are computed a tile at a time; a bit says whether an element has a sum.
  constexpr uint64_t kTileElems = 1024;
  std::array<float, kTileElems> sums;
  std::array<uint64_t, kTileElems / 64> present{};
  std::vector<TopKEntries> entries(contributions.begin(), contributions.end());
  Writer writer(out);
  for (uint64_t begin = 0; begin < elems; begin += kTileElems) {
    for (size_t k = 0; k < entries.size(); ++k) {
      const float weight = weighting.weights[k];
      for (; !entries[k].Done() && entries[k].index() < begin + kTileElems; entries[k].Next()) {
        const uint64_t i = entries[k].index() - begin;
        const uint64_t bit = uint64_t{1} << (i % 64);
        const float value = entries[k].value();
        sums[i] = (present[i / 64] & bit) != 0 ? std::fma(weight, value, sums[i]) : weight * value;
        present[i / 64] |= bit;
      }
    }
    for (size_t word = 0; word < present.size(); ++word) {
      for (; present[word] != 0; present[word] &= present[word] - 1) {
        const uint64_t i = word * 64 + static_cast<uint64_t>(std::countr_zero(present[word]));
        writer.Add(begin + i, sums[i] / weighting.divisor);
      }
    }
  }
  return writer.Finish();
}

}  // namespace thalweg
