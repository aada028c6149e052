#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/cast/cast.h"
#include "kernels/codec/cursor.h"
#include "kernels/codec/lossy_kernels.h"
#include "kernels/codec/topk/topk.h"

namespace thalweg {
namespace {

// Returns contiguous bytes of a payload: where they are, or copied to `storage`.
std::span<const std::byte> Contiguous(const Payload& payload, std::vector<std::byte>& storage) {
  Cursor cursor(payload);
  const size_t bytes = payload.SizeBytes();
  if (bytes == cursor.ContiguousBytes()) return {bytes == 0 ? nullptr : cursor.Data(), bytes};
  storage.resize(bytes);
  cursor.CopyOut(storage.data(), bytes);
  return storage;
}

absl::Status CheckEntries(const std::string& what, std::span<const std::byte> payload,
                          uint64_t elems) {
  const absl::Status status = CheckTopK(payload, elems);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(what, ": topk payload: ", status.message()));
}

class TopKCodec final : public LossyKernels {
 public:
  Encoded Encode(double topk_ratio, const float* values, Feedback feedback, uint64_t elems,
                 std::byte* out) const override {
    return EncodeTopK(values, feedback, elems, TopKCount(topk_ratio, elems), out);
  }

  absl::Status Decode(const Payload& payload, DType bucket, uint64_t elems,
                      std::byte* out) const override {
    std::vector<std::byte> storage;
    const std::span<const std::byte> bytes = Contiguous(payload, storage);
    THALWEG_RETURN_IF_ERROR(CheckEntries("result", bytes, elems));
    if (elems == 0) return absl::OkStatus();
    // In every type, all bits 0 is the number zero.
    std::memset(out, 0, elems * SizeOf(bucket));
    for (TopKEntries entries(bytes); !entries.Done(); entries.Next()) {
      const float value = entries.value();
      Cast(DType::kFloat32, &value, bucket, out + entries.index() * SizeOf(bucket), 1);
    }
    return absl::OkStatus();
  }

  uint64_t CountLarge(const Payload& payload, float least, uint64_t elems) const override {
    if (elems == 0) return 0;
    std::vector<std::byte> storage;
    uint64_t count = 0;
    for (TopKEntries entry(Contiguous(payload, storage)); !entry.Done(); entry.Next()) {
      if (std::isfinite(entry.value()) && std::abs(entry.value()) >= least) ++count;
    }
    return count;
  }

  absl::StatusOr<Encoded> Fold(std::span<const Payload> contributions, const Weighting& weighting,
                               uint64_t elems, float* /*residual*/, std::byte* out) const override {
    std::vector<std::vector<std::byte>> storage(contributions.size());
    std::vector<std::span<const std::byte>> payloads;
    for (size_t k = 0; k < contributions.size(); ++k) {
      payloads.push_back(Contiguous(contributions[k], storage[k]));
      THALWEG_RETURN_IF_ERROR(CheckEntries(absl::StrCat("contribution ", k), payloads[k], elems));
    }
    return FoldTopK(payloads, weighting, elems, out);
  }
};

}  // namespace

const LossyKernels& TopKKernels() {
  static constexpr TopKCodec kCodec;
  return kCodec;
}

}  // namespace thalweg
