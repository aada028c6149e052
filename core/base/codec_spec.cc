#include "core/base/codec_spec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <span>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

constexpr std::array kWireTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr uint32_t kMaxRank = 256;
constexpr uint64_t kMaxIteration = uint64_t{1} << 40;
constexpr uint64_t kMaxSeed = std::numeric_limits<uint64_t>::max();
constexpr double kMaxReal = 1e6;

// A Key is a parameter in the text form. The error of `read` says what was expected.
struct Key {
  absl::string_view name;
  absl::Status (*read)(absl::string_view text, CodecSpec& spec);
  std::string (*write)(const CodecSpec& spec);
};

template <auto kField, auto kMin, auto kMax>
constexpr Key Integer(absl::string_view name) {
  return {name,
          [](absl::string_view text, CodecSpec& spec) -> absl::Status {
            auto value = kMax;
            if (absl::SimpleAtoi(text, &value) && value >= kMin && value <= kMax) {
              spec.*kField = value;
              return absl::OkStatus();
            }
            return absl::InvalidArgumentError(absl::StrCat("expected ", kMin, " to ", kMax));
          },
          [](const CodecSpec& spec) { return absl::StrCat(spec.*kField); }};
}

template <auto kField>
constexpr Key Flag(absl::string_view name) {
  return {name,
          [](absl::string_view text, CodecSpec& spec) -> absl::Status {
            if (text != "0" && text != "1") return absl::InvalidArgumentError("expected 0 or 1");
            spec.*kField = text == "1";
            return absl::OkStatus();
          },
          [](const CodecSpec& spec) { return std::string(spec.*kField ? "1" : "0"); }};
}

// Writes six digits where they reproduce the value, as people write it; otherwise as many as
// needed.
std::string WriteReal(double value) {
  value += 0.0;  // removes the sign of -0.0
  const std::string six_digits = absl::StrCat(value);
  double read = 0;
  if (absl::SimpleAtod(six_digits, &read) && read == value) return six_digits;
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

template <auto kField>
constexpr Key Real(absl::string_view name) {
  return {name,
          [](absl::string_view text, CodecSpec& spec) -> absl::Status {
            double value = 0;
            if (absl::SimpleAtod(text, &value) && value >= 0 && value <= kMaxReal) {
              spec.*kField = value;
              return absl::OkStatus();
            }
            return absl::InvalidArgumentError(absl::StrCat("expected 0 to ", kMaxReal));
          },
          [](const CodecSpec& spec) { return WriteReal(spec.*kField); }};
}

absl::Status ReadRatio(absl::string_view text, CodecSpec& spec) {
  double value = 0;
  if (absl::SimpleAtod(text, &value) && value > 0 && value <= 1) {
    spec.topk_ratio = value;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("expected a number above 0, at most 1");
}

absl::Status ReadWire(absl::string_view text, CodecSpec& spec) {
  for (const DType type : kWireTypes) {
    if (text != Name(type)) continue;
    spec.wire = type;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("expected fp32, fp16 or bf16");
}

constexpr Key kRank = Integer<&CodecSpec::rank, uint32_t{1}, kMaxRank>("rank");
constexpr Key kStart = Integer<&CodecSpec::start, uint64_t{0}, kMaxIteration>("start");
constexpr Key kSeed = Integer<&CodecSpec::seed, uint64_t{0}, kMaxSeed>("seed");
constexpr Key kFeedback = Flag<&CodecSpec::feedback>("feedback");
constexpr Key kRatio = {"ratio", ReadRatio,
                        [](const CodecSpec& spec) { return WriteReal(spec.topk_ratio); }};
constexpr Key kWire = {"wire", ReadWire,
                       [](const CodecSpec& spec) { return std::string(Name(spec.wire)); }};

constexpr std::array kPowerSgdKeys = {kRank,
                                      kStart,
                                      Real<&CodecSpec::min_rate>("min_rate"),
                                      kWire,
                                      Flag<&CodecSpec::warm>("warm"),
                                      kFeedback,
                                      kSeed,
                                      Real<&CodecSpec::epsilon>("epsilon")};
constexpr std::array kLossyKeys = {kStart, kFeedback};
constexpr std::array kRatioKeys = {kRatio, kStart, kFeedback};
constexpr std::array kAutoKeys = {kRank, kStart, kSeed};

struct Kind {
  absl::string_view name;
  CodecSpec defaults;
  std::span<const Key> keys = {};
  bool first_key_alone = false;  // its value may be given without its name
};

// This is the first iteration that torch's hooks allow: DDP rebuilds its buckets after the first
// one.
constexpr uint64_t kLossyStart = 2;

constexpr std::span<const Key> LossyKeys(WireFormat format) {
  if (FindLossy(format)->takes_ratio) return kRatioKeys;
  return kLossyKeys;
}

constexpr auto kKinds = std::to_array<Kind>({
    {"fp32", {.wire = DType::kFloat32}},
    {"fp16", {.wire = DType::kFloat16}},
    {"bf16", {.wire = DType::kBFloat16}},
    {"powersgd", {.kind = CodecKind::kPowerSgd}, kPowerSgdKeys, true},
#define THALWEG_LOSSY_KIND(Name, number, text, ...)                                  \
  {text,                                                                             \
   {.kind = CodecKind::kLossy, .format = WireFormat::k##Name, .start = kLossyStart}, \
   LossyKeys(WireFormat::k##Name),                                                   \
   FindLossy(WireFormat::k##Name)->takes_ratio},
    THALWEG_LOSSY_FORMATS(THALWEG_LOSSY_KIND)
#undef THALWEG_LOSSY_KIND
        {"auto", {.kind = CodecKind::kAuto, .rank = 4}, kAutoKeys, true},
});

constexpr auto kNameOf = [](std::string* out, const auto& item) {
  out->append(item.name.data(), item.name.size());
};

// The first of the casts represents all of them.
const Kind& KindOf(const CodecSpec& spec) {
  const auto is_it = [&spec](const Kind& known) {
    return known.defaults.kind == spec.kind && known.defaults.format == spec.format;
  };
  return *std::find_if(kKinds.begin(), kKinds.end(), is_it);
}

// Reads `part`: one of several "key=value", or the value of the first key alone.
absl::Status ReadPart(const Kind& kind, absl::string_view part, bool alone, CodecSpec& spec) {
  std::pair<absl::string_view, absl::string_view> pair =
      absl::StrSplit(part, absl::MaxSplits('=', 1));
  if (kind.first_key_alone && alone && part.find('=') == absl::string_view::npos) {
    pair = {kind.keys.front().name, part};
  }
  for (const Key& key : kind.keys) {
    if (key.name != pair.first) continue;
    const absl::Status status = key.read(pair.second, spec);
    if (status.ok()) return status;
    return absl::InvalidArgumentError(
        absl::StrCat(pair.first, " is '", pair.second, "', ", status.message()));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown key '", pair.first, "', known are ",
                                                 absl::StrJoin(kind.keys, ", ", kNameOf)));
}

absl::Status Wrong(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("codec '", text, "': ", why));
}

}  // namespace

absl::StatusOr<CodecSpec> CodecSpec::Parse(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> split =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  const auto& [name, arguments] = split;
  const Kind* found = nullptr;
  for (const Kind& kind : kKinds) {
    if (kind.name == name) found = &kind;
  }
  if (found == nullptr) {
    return Wrong(text, absl::StrCat("expected one of ", absl::StrJoin(kKinds, ", ", kNameOf),
                                    ", as in powersgd:rank=4,start=1000"));
  }
  if (found->keys.empty() && name != text) return Wrong(text, absl::StrCat(name, " has no keys"));
  CodecSpec spec = found->defaults;
  for (const absl::string_view part : absl::StrSplit(arguments, ',', absl::SkipEmpty())) {
    const absl::Status status = ReadPart(*found, part, part == arguments, spec);
    if (!status.ok()) return Wrong(text, status.message());
  }
  return spec;
}

std::string CodecSpec::ToString() const {
  const Kind& described = KindOf(*this);
  if (described.keys.empty()) return Name();
  const auto pair = [this](std::string* out, const Key& key) {
    absl::StrAppend(out, key.name, "=", key.write(*this));
  };
  return absl::StrCat(described.name, ":", absl::StrJoin(described.keys, ",", pair));
}

std::string CodecSpec::Name() const {
  return kind == CodecKind::kCast ? thalweg::Name(wire) : std::string(KindOf(*this).name);
}

std::vector<CodecSpec> AutoCandidates(const CodecSpec& codec) {
  return {
      {.wire = DType::kFloat32},
      {.wire = DType::kFloat16},
      {.kind = CodecKind::kLossy, .format = WireFormat::kInt8, .start = kLossyStart},
      {.kind = CodecKind::kPowerSgd, .rank = codec.rank, .start = codec.start, .seed = codec.seed}};
}

DType DenseType(DType bucket, const CodecSpec& codec) {
  return bucket == DType::kFloat32 ? codec.wire : bucket;
}

}  // namespace thalweg
