#include "server/aggregator/letters.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace thalweg {
namespace {

// What a letter takes beside its payload, about.
constexpr uint64_t kLetterOverhead = 512;

// Counts a letter's bytes until its payload is released.
class Counted {
 public:
  Counted(std::shared_ptr<std::atomic<uint64_t>> total, Payload payload)
      : total_(std::move(total)),
        payload_(std::move(payload)),
        bytes_(payload_.SizeBytes() + kLetterOverhead) {
    *total_ += bytes_;
  }
  ~Counted() { *total_ -= bytes_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  const std::shared_ptr<std::atomic<uint64_t>> total_;
  const Payload payload_;
  const uint64_t bytes_;
};

}  // namespace

absl::Status Letters::Check(const std::string& name, uint32_t node, const Contribution& letter,
                            uint64_t epoch, uint64_t chunk_bytes) const {
  const Collective& way = letter.collective;
  const uint64_t bytes = letter.payload.SizeBytes();
  const std::string which = absl::StrCat(name, ": ", ToString(letter.id), ": ");
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(which, why));
  };
  if (letter.id.bucket != LettersOf(node) || way.from != Place::One(node) ||
      way.to.kind != Place::Kind::kOne || way.to.node >= num_nodes_ || way.fold != Fold::kNone ||
      letter.epoch != epoch) {
    return refused(
        absl::StrCat("'", ToString(way), "' in epoch ", letter.epoch, " is no way that it can go"));
  }
  if (letter.wire != WireFormat::kDenseUInt8 || letter.elems != bytes || bytes > chunk_bytes) {
    return refused(absl::StrCat("expected at most ", chunk_bytes, " bytes, got ", bytes, " for ",
                                letter.elems, " elements in ", Name(letter.wire)));
  }
  if (*bytes_ + bytes + kLetterOverhead <= kLetterBytesPerNode * num_nodes_)
    return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(which, bytes_->load(), " bytes of letters have not been taken yet"));
}

RoundResult Letters::Take(Contribution letter) const {
  RoundResult result;
  result.id = letter.id;
  result.epoch = letter.epoch;
  result.wire = letter.wire;
  result.elems = letter.elems;
  result.workers = 1;
  result.payload.pieces = letter.payload.pieces;
  result.payload.owner = std::make_shared<const Counted>(bytes_, std::move(letter.payload));
  return result;
}

}  // namespace thalweg
