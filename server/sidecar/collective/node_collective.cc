#include "server/sidecar/collective/node_collective.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/wire_format.h"
#include "kernels/reduce/fold_elements.h"
#include "kernels/reduce/reduce.h"

namespace thalweg {
namespace {

void FoldInto(Fold fold, std::span<const void* const> inputs, DType dtype, void* out,
              uint64_t elems) {
  if (fold == Fold::kMean) {
    const std::vector<float> ones(inputs.size(), 1.0f);
    FoldMean(inputs, ones, static_cast<float>(inputs.size()), dtype, dtype, out, elems);
  } else {
    FoldElements(fold, inputs, dtype, out, elems);
  }
}

}  // namespace

NodeCollective::NodeCollective(uint32_t rank, const ipc::Collect& first, std::string group_name,
                               std::shared_ptr<const GroupPlaces> places,
                               NodeValues::OnReleased on_released, TimePoint now)
    : spec_(first),
      group_name_(std::move(group_name)),
      places_(std::move(places)),
      since_(now),
      plan_(PlanCollective(first.kind, first.fold, first.root, *places_)),
      values_(std::make_shared<NodeValues>(places_->here().size(), std::move(on_released))),
      first_rank_(rank) {
  spec_.values.clear();
}

size_t NodeCollective::PlaceOf(uint32_t rank) const {
  const auto& here = places_->here();
  return static_cast<size_t>(std::lower_bound(here.begin(), here.end(), rank) - here.begin());
}

absl::Status NodeCollective::Add(uint32_t rank, const ipc::Collect& message, uint64_t arena_bytes,
                                 GivenValues values) {
  const auto text = [](const ipc::Collect& m) {
    return absl::StrCat(thalweg::Name(m.kind), ", ", TextOf(m));
  };
  if (message.kind != spec_.kind || message.fold != spec_.fold || message.dtype != spec_.dtype ||
      message.root != spec_.root || message.elems != spec_.elems) {
    return absl::InvalidArgumentError(absl::StrCat(
        "collective ", spec_.sequence, " of group '", group_name_, "' is ", text(spec_),
        " on rank ", first_rank_, " of the group, but ", text(message), " on rank ", rank));
  }
  const uint64_t expected =
      UnitsGiven(spec_.kind, places_->size(), rank == spec_.root) * unit_bytes();
  const uint64_t got = message.arena == 0 ? message.values.size() : arena_bytes;
  if (message.arena == 0 ? got != expected : got < expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(), ": rank ", rank, " gives ", got, " bytes, expected ", expected));
  }
  auto& place = (*values_)[PlaceOf(rank)];
  if (!place) ++given_;
  place.emplace(std::move(values));
  return absl::OkStatus();
}

std::vector<uint32_t> NodeCollective::Missing() const {
  std::vector<uint32_t> missing;
  for (size_t i = 0; i < values_->size(); ++i) {
    if (!(*values_)[i]) missing.push_back(places_->here()[i]);
  }
  return missing;
}

bool NodeCollective::IsSmall() const {
  if (result_size() > ipc::kMaxInlineBytes) return false;
  return std::all_of(values_->begin(), values_->end(),
                     [](const auto& values) { return values->is_inline(); });
}

void NodeCollective::Begin(uint64_t chunk_bytes, uint32_t num_shards, const ShardsOf& shards_of,
                           std::shared_ptr<ResultArena> result) {
  result_ = std::move(result);
  if (result_ == nullptr) inline_result_.resize(result_size());
  // Bytes that are only passed on may be cut anywhere.
  const DType dtype = Folds(spec_.kind) ? spec_.dtype : DType::kUInt8;
  const uint64_t size = SizeOf(dtype);
  for (uint32_t r = 0; r < plan_.routes.size(); ++r) {
    const Route& route = plan_.routes[r];
    const bool is_barrier = spec_.kind == CollectiveKind::kBarrier;
    const uint64_t bytes = route.segments.size() * unit_bytes();
    if (bytes == 0 && !is_barrier) continue;
    if (is_barrier) {
      if (!route.stays) chunks_.push_back({r, 0, 0, 0});
      continue;
    }
    const ChunkPlan cut =
        ChunkPlan::For(bytes / size, dtype, FormatOf(dtype), chunk_bytes, num_shards);
    const std::vector<uint32_t> shards =
        route.stays ? std::vector<uint32_t>(cut.Count()) : shards_of(route, cut);
    for (uint32_t c = 0; c < cut.Count(); ++c) {
      const uint64_t begin = cut.Begin(c);
      chunks_.push_back({r, shards[c], begin * size, (begin + cut.Elems(c)) * size});
    }
  }
  MutexLock lock(mutex_);
  remaining_ = num_chunks();
  came_.assign(num_chunks(), false);
  if (result_size() >= ipc::kFewestParts * ipc::kPartBytes) {
    parts_ = PartsCount(result_size(), ipc::kPartBytes);
  }
}

std::byte* NodeCollective::result_bytes() {
  return result_ == nullptr ? reinterpret_cast<std::byte*>(inline_result_.data())
                            : result_->arena.payload();
}

void NodeCollective::ForPieces(const Chunk& chunk, auto&& use) const {
  const uint64_t unit = unit_bytes();
  for (uint64_t at = chunk.begin; at < chunk.end;) {
    const uint64_t within = at % unit;
    const uint64_t bytes = std::min(unit - within, chunk.end - at);
    use(RouteOf(static_cast<uint32_t>(&chunk - chunks_.data())).segments[at / unit],
        at - chunk.begin, within, bytes);
    at += bytes;
  }
}

absl::StatusOr<Payload> NodeCollective::Gather(const Chunk& chunk, const JobOutcome& outcome) {
  Payload payload;
  absl::Status status;
  ForPieces(chunk, [&](const Segment& segment, uint64_t, uint64_t within, uint64_t bytes) {
    const GivenValues& values = *(*values_)[PlaceOf(segment.giver)];
    const uint64_t begin = segment.given * unit_bytes() + within;
    if (status.ok()) status = values.Await(begin + bytes, outcome);
    payload.pieces.emplace_back(values.data() + begin, bytes);
  });
  THALWEG_RETURN_IF_ERROR(status);
  payload.owner = values_;
  return payload;
}

absl::Status NodeCollective::FoldPieces(const Chunk& chunk, const JobOutcome& outcome,
                                        auto&& place_of) {
  absl::Status status;
  ForPieces(chunk, [&](const Segment& segment, uint64_t at, uint64_t within, uint64_t bytes) {
    const uint64_t begin = segment.given * unit_bytes() + within;
    std::vector<const void*> inputs;
    for (const auto& values : *values_) {
      if (status.ok()) status = values->Await(begin + bytes, outcome);
      inputs.push_back(values->data() + begin);
    }
    if (!status.ok()) return;
    FoldInto(spec_.fold, inputs, spec_.dtype, place_of(segment, at, within),
             bytes / SizeOf(spec_.dtype));
  });
  return status;
}

absl::StatusOr<Payload> NodeCollective::FoldHere(const Chunk& chunk, const JobOutcome& outcome) {
  // What one worker gives is folded elsewhere.
  if (values_->size() == 1) return Gather(chunk, outcome);
  const uint64_t total = chunk.end - chunk.begin;
  const auto folded = std::make_shared_for_overwrite<std::byte[]>(total);
  THALWEG_RETURN_IF_ERROR(FoldPieces(
      chunk, outcome,
      [&](const Segment&, uint64_t at, uint64_t /*within*/) { return folded.get() + at; }));
  return Payload({folded.get(), total}, folded);
}

absl::StatusOr<Contribution> NodeCollective::MakeContribution(uint32_t number,
                                                              const JobOutcome& outcome) {
  const Chunk& chunk = chunks_[number];
  const Route& route = RouteOf(number);
  const DType dtype = Folds(spec_.kind) ? spec_.dtype : DType::kUInt8;
  Contribution contribution;
  contribution.id = {OneShotsOf(spec_.group), number, spec_.sequence};
  contribution.wire = FormatOf(dtype);
  contribution.elems = (chunk.end - chunk.begin) / SizeOf(dtype);
  contribution.group = spec_.group;
  contribution.collective = route.what;
  contribution.settings = CallOf(spec_.kind, spec_.root);
  contribution.timeout = FromMillis(spec_.timeout_ms);
  if (route.what.from.Has(places_->node())) {
    THALWEG_ASSIGN_OR_RETURN(contribution.payload,
                             Folds(spec_.kind) ? FoldHere(chunk, outcome) : Gather(chunk, outcome));
  }
  return contribution;
}

absl::Status NodeCollective::Keep(uint32_t number, const JobOutcome& outcome) {
  const Route& route = RouteOf(number);
  const Place here = Place::One(places_->node());
  if (route.what.from.kind == Place::Kind::kOne && route.what.from != here) return absl::OkStatus();
  const Chunk& chunk = chunks_[number];
  if (!Folds(spec_.kind) || values_->size() == 1) {
    THALWEG_ASSIGN_OR_RETURN(const Payload payload, Gather(chunk, outcome));
    Put(chunk, payload);
    return absl::OkStatus();
  }
  THALWEG_RETURN_IF_ERROR(
      FoldPieces(chunk, outcome, [this](const Segment& segment, uint64_t /*at*/, uint64_t within) {
        return result_bytes() + segment.got * unit_bytes() + within;
      }));
  CountParts(chunk);
  return absl::OkStatus();
}

void NodeCollective::Put(const Chunk& chunk, const Payload& payload) {
  if (plan_.result_units == 0) return;
  auto piece = payload.pieces.begin();
  size_t used = 0;  // of the piece
  ForPieces(chunk, [&](const Segment& segment, uint64_t, uint64_t within, uint64_t bytes) {
    std::byte* to = result_bytes() + segment.got * unit_bytes() + within;
    while (bytes > 0) {
      const uint64_t count = std::min<uint64_t>(bytes, piece->size() - used);
      std::memcpy(to, piece->data() + used, count);
      to += count;
      bytes -= count;
      used += count;
      if (used == piece->size()) {
        ++piece;
        used = 0;
      }
    }
  });
  CountParts(chunk);
}

void NodeCollective::CountParts(const Chunk& chunk) {
  ForPieces(chunk, [this](const Segment& segment, uint64_t, uint64_t within, uint64_t bytes) {
    const uint64_t begin = segment.got * unit_bytes() + within;
    MutexLock lock(mutex_);
    parts_.Add(begin, begin + bytes);
  });
}

absl::Status NodeCollective::TakeResult(const RoundResult& received) {
  const uint32_t number = received.id.chunk;
  if (number >= num_chunks() || !Crosses(number)) {
    return absl::InvalidArgumentError(absl::StrCat(Name(), " has no chunk ", number));
  }
  const Chunk& chunk = chunks_[number];
  const bool is_mine = RouteOf(number).what.to.Has(places_->node()) &&
                       RouteOf(number).what.to.kind != Place::Kind::kNone;
  const uint64_t expected = is_mine ? chunk.end - chunk.begin : 0;
  if (received.payload.SizeBytes() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(Name(), ": chunk ", number, " came with ",
                                                   received.payload.SizeBytes(),
                                                   " bytes, expected ", expected));
  }
  {
    MutexLock lock(mutex_);
    if (came_[number]) {
      return absl::FailedPreconditionError(absl::StrCat(Name(), ": chunk ", number, " came twice"));
    }
    came_[number] = true;
  }
  if (is_mine) Put(chunk, received.payload);
  return absl::OkStatus();
}

bool NodeCollective::FinishChunk() {
  MutexLock lock(mutex_);
  return --remaining_ == 0;
}

uint32_t NodeCollective::remaining() const {
  MutexLock lock(mutex_);
  return remaining_;
}

std::vector<uint32_t> NodeCollective::TakeNewParts() {
  MutexLock lock(mutex_);
  return parts_.Take();
}

std::optional<ipc::CollectedPart> NodeCollective::PartFor(uint32_t rank, uint32_t part) const {
  const ipc::Collected whole = ResultFor(rank);
  MutexLock lock(mutex_);
  const uint64_t begin = std::max(parts_.Begin(part), whole.offset);
  const uint64_t end = std::min(parts_.End(part), whole.offset + whole.bytes);
  if (begin >= end) return std::nullopt;
  return ipc::CollectedPart{.group = spec_.group,
                            .sequence = spec_.sequence,
                            .arena = whole.arena,
                            .offset = whole.offset,
                            .begin = begin - whole.offset,
                            .bytes = end - begin};
}

ipc::Collected NodeCollective::ResultFor(uint32_t rank) const {
  ipc::Collected message{.group = spec_.group, .sequence = spec_.sequence, .values = {}};
  message.bytes = UnitsGot(spec_.kind, places_->size(), rank == spec_.root) * unit_bytes();
  const uint64_t offset = plan_.offsets[PlaceOf(rank)] * unit_bytes();
  if (message.bytes == 0) return message;
  if (result_ != nullptr) {
    message.arena = result_->number;
    message.offset = offset;
  } else {
    message.values = inline_result_.substr(offset, message.bytes);
  }
  return message;
}

bool NodeCollective::NoteTaken() {
  const auto& here = places_->here();
  const auto takers = std::count_if(here.begin(), here.end(), [this](uint32_t rank) {
    return UnitsGot(spec_.kind, places_->size(), rank == spec_.root) > 0;
  });
  MutexLock lock(mutex_);
  return ++taken_ == static_cast<uint32_t>(takers);
}

}  // namespace thalweg
