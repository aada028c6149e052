#include "server/transport/wire/chunk_fields.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {
namespace {

using Field = v1::Chunk;

static_assert(Field::kSettingsFieldNumber + 1 == kScalarNames.size());
static_assert(Field::kPayloadFieldNumber >= kScalarNames.size());  // the last field

constexpr bool IsSame(ChunkKind ours, v1::ChunkKind theirs) {
  return static_cast<int>(ours) == theirs;
}
static_assert(IsSame(ChunkKind::kContribution, v1::CHUNK_KIND_CONTRIBUTION));
static_assert(IsSame(ChunkKind::kResult, v1::CHUNK_KIND_RESULT));

constexpr bool IsSame(Fold ours, v1::Fold theirs) { return static_cast<int>(ours) == theirs; }
static_assert(IsSame(Fold::kMean, v1::FOLD_MEAN));
static_assert(IsSame(Fold::kSum, v1::FOLD_SUM));
static_assert(IsSame(Fold::kMin, v1::FOLD_MIN));
static_assert(IsSame(Fold::kMax, v1::FOLD_MAX));
static_assert(IsSame(Fold::kProduct, v1::FOLD_PRODUCT));
static_assert(IsSame(Fold::kBitAnd, v1::FOLD_BIT_AND));
static_assert(IsSame(Fold::kBitOr, v1::FOLD_BIT_OR));
static_assert(IsSame(Fold::kBitXor, v1::FOLD_BIT_XOR));
static_assert(IsSame(Fold::kNone, v1::FOLD_NONE));

// Places cross the wire as these numbers, and node n as n + kNodes.
constexpr uint64_t kAll = 0;
constexpr uint64_t kNobody = 1;
constexpr uint64_t kNodes = 2;
constexpr uint64_t kLastPlace = kNodes + std::numeric_limits<uint32_t>::max();

constexpr uint64_t NumberOf(const Place& place) {
  switch (place.kind) {
    case Place::Kind::kAll:
      return kAll;
    case Place::Kind::kNone:
      return kNobody;
    case Place::Kind::kOne:
      break;
  }
  return kNodes + place.node;
}

// Requires number <= kLastPlace.
constexpr Place PlaceOf(uint64_t number) {
  if (number == kAll) return Place::All();
  if (number == kNobody) return Place::None();
  return Place::One(static_cast<uint32_t>(number - kNodes));
}

constexpr uint64_t kMaxMillis =
    std::chrono::duration_cast<std::chrono::milliseconds>(kMaxRoundPatience).count();

absl::Status Refused(int field, uint64_t value, const std::string& expected) {
  return absl::InvalidArgumentError(absl::StrCat("malformed frame: ", kScalarNames[field], " is ",
                                                 value, ", expected ", expected));
}

absl::Status CheckMost(const Scalars& scalars, int field, uint64_t most) {
  if (scalars[field] <= most) return absl::OkStatus();
  return Refused(field, scalars[field], absl::StrCat("at most ", most));
}

}  // namespace

ChunkHeader HeaderOf(const Contribution& contribution) {
  return {.id = contribution.id,
          .epoch = contribution.epoch,
          .wire = contribution.wire,
          .elems = contribution.elems,
          .loss_scale = contribution.loss_scale,
          .kind = ChunkKind::kContribution,
          .group = contribution.group,
          .collective = contribution.collective,
          .timeout = contribution.timeout,
          .settled = contribution.settled,
          .settings = contribution.settings};
}

ChunkHeader HeaderOf(const RoundResult& result) {
  return {.id = result.id,
          .epoch = result.epoch,
          .wire = result.wire,
          .elems = result.elems,
          .workers = result.workers,
          .nonfinite_elems = result.nonfinite_elems,
          .kind = ChunkKind::kResult};
}

Contribution ToContribution(const ChunkHeader& header, Payload payload) {
  return {.id = header.id,
          .epoch = header.epoch,
          .wire = header.wire,
          .elems = header.elems,
          .payload = std::move(payload),
          .loss_scale = header.loss_scale,
          .group = header.group,
          .collective = header.collective,
          .timeout = header.timeout,
          .settled = header.settled,
          .settings = header.settings};
}

RoundResult ToResult(const ChunkHeader& header, Payload payload) {
  return {.id = header.id,
          .epoch = header.epoch,
          .wire = header.wire,
          .elems = header.elems,
          .workers = header.workers,
          .nonfinite_elems = header.nonfinite_elems,
          .payload = std::move(payload)};
}

uint64_t ToMillis(Duration timeout) {
  const Duration sent = std::clamp(timeout, Duration::zero(), kMaxRoundPatience);
  return static_cast<uint64_t>(std::chrono::ceil<std::chrono::milliseconds>(sent).count());
}

Scalars ScalarsOf(const ChunkHeader& header) {
  return {0,
          header.epoch,
          header.id.bucket.index,
          header.id.bucket.generation,
          header.id.chunk,
          header.id.round,
          static_cast<uint64_t>(header.wire),
          header.elems,
          header.workers,
          header.nonfinite_elems,
          header.id.bucket.part,
          std::bit_cast<uint64_t>(header.loss_scale),
          header.acknowledged,
          static_cast<uint64_t>(header.kind),
          header.group,
          NumberOf(header.collective.from),
          NumberOf(header.collective.to),
          static_cast<uint64_t>(header.collective.fold),
          ToMillis(header.timeout),
          header.settled,
          header.settings};
}

absl::Status SetHeader(const Scalars& scalars, ChunkHeader* header) {
  // Protobuf drops the upper bits of a number that is too long for its field.
  const auto u32 = [&scalars](int field) { return static_cast<uint32_t>(scalars[field]); };
  const uint32_t wire = u32(Field::kWireFieldNumber);
  if (wire > std::numeric_limits<uint8_t>::max() || !IsValid(static_cast<WireFormat>(wire))) {
    return Refused(Field::kWireFieldNumber, wire, "1 to 9 or 16 to 18");
  }
  const uint32_t kind = u32(Field::kKindFieldNumber);
  if (kind > static_cast<uint32_t>(ChunkKind::kResult)) {
    return Refused(Field::kKindFieldNumber, kind, "0 or 1");
  }
  const uint32_t fold = u32(Field::kFoldFieldNumber);
  if (fold > std::numeric_limits<uint8_t>::max() || !IsValid(static_cast<Fold>(fold))) {
    return Refused(Field::kFoldFieldNumber, fold, "0 to 8");
  }
  THALWEG_RETURN_IF_ERROR(CheckMost(scalars, Field::kFromFieldNumber, kLastPlace));
  THALWEG_RETURN_IF_ERROR(CheckMost(scalars, Field::kToFieldNumber, kLastPlace));
  THALWEG_RETURN_IF_ERROR(CheckMost(scalars, Field::kTimeoutMsFieldNumber, kMaxMillis));
  header->id.bucket = {u32(Field::kBucketIndexFieldNumber),
                       u32(Field::kBucketGenerationFieldNumber), u32(Field::kPartFieldNumber)};
  header->id.chunk = u32(Field::kChunkFieldNumber);
  header->id.round = scalars[Field::kRoundFieldNumber];
  header->epoch = scalars[Field::kEpochFieldNumber];
  header->wire = static_cast<WireFormat>(wire);
  header->elems = scalars[Field::kElemsFieldNumber];
  header->workers = u32(Field::kWorkersFieldNumber);
  header->nonfinite_elems = scalars[Field::kNonfiniteElemsFieldNumber];
  header->loss_scale = std::bit_cast<double>(scalars[Field::kLossScaleFieldNumber]);
  header->acknowledged = scalars[Field::kAcknowledgedFieldNumber];
  header->kind = static_cast<ChunkKind>(kind);
  header->group = u32(Field::kGroupFieldNumber);
  header->collective = {PlaceOf(scalars[Field::kFromFieldNumber]),
                        PlaceOf(scalars[Field::kToFieldNumber]), static_cast<Fold>(fold)};
  header->timeout =
      std::chrono::milliseconds(static_cast<int64_t>(scalars[Field::kTimeoutMsFieldNumber]));
  header->settled = scalars[Field::kSettledFieldNumber];
  header->settings = scalars[Field::kSettingsFieldNumber];
  return absl::OkStatus();
}

}  // namespace thalweg
