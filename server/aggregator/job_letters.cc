// This file holds the part of Job through which letters go from one node to another.
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/aggregator/job.h"

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

absl::Status Job::CheckLetterLocked(uint32_t node, const Contribution& letter) const {
  const Collective& way = letter.collective;
  const uint64_t bytes = letter.payload.SizeBytes();
  const std::string name = absl::StrCat(members_.Name(node), ": ", ToString(letter.id), ": ");
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(name, why));
  };
  if (letter.id.bucket != LettersOf(node) || way.from != Place::One(node) ||
      way.to.kind != Place::Kind::kOne || way.to.node >= spec_.num_nodes ||
      way.fold != Fold::kNone || letter.epoch != members_.epoch()) {
    return refused(
        absl::StrCat("'", ToString(way), "' in epoch ", letter.epoch, " is no way that it can go"));
  }
  if (letter.wire != WireFormat::kDenseUInt8 || letter.elems != bytes ||
      bytes > plan_.flow().chunk_bytes) {
    return refused(absl::StrCat("expected at most ", plan_.flow().chunk_bytes, " bytes, got ",
                                bytes, " for ", letter.elems, " elements in ", Name(letter.wire)));
  }
  if (*letter_bytes_ + bytes + kLetterOverhead <= kLetterBytesPerNode * spec_.num_nodes)
    return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(name, letter_bytes_->load(), " bytes of letters have not been taken yet"));
}

absl::Status Job::PassOn(uint32_t node, Contribution letter, TimePoint now) {
  std::shared_ptr<ServedNode> sink;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    THALWEG_RETURN_IF_ERROR(CheckActiveLocked(node));
    members_.Hear(node, now);
    status = CheckLetterLocked(node, letter);
    if (status.ok() && !std::exchange(has_letters_, true)) status = ReserveLocked();
    if (status.ok()) sink = peers_[letter.collective.to.node].sink;
    // A receipt, which has no number, says nothing to a node that has left.
    if (status.ok() && sink == nullptr && letter.id.round == 0) return absl::OkStatus();
    if (status.ok() && sink == nullptr) {
      status = absl::FailedPreconditionError(
          absl::StrCat(ToString(letter.id),
                       " cannot arrive: ", members_.Name(letter.collective.to.node), " has left"));
    }
  }
  if (!status.ok()) {
    Fail(status);
    return OfJob(spec_.job, status);
  }
  RoundResult result;
  result.id = letter.id;
  result.epoch = letter.epoch;
  result.wire = letter.wire;
  result.elems = letter.elems;
  result.workers = 1;
  result.payload.pieces = letter.payload.pieces;
  result.payload.owner = std::make_shared<const Counted>(letter_bytes_, std::move(letter.payload));
  const auto bytes = static_cast<double>(result.elems);
  metrics_.bytes_in.Add(bytes);
  metrics_.bytes_out.Add(bytes);
  delivered_.wire_bytes.Add(bytes);
  sink->OnResult(std::move(result));
  return absl::OkStatus();
}

}  // namespace thalweg
