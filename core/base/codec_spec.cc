#include "core/base/codec_spec.h"

#include <array>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

constexpr std::array kWireTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr uint32_t kMaxRank = 256;
constexpr uint64_t kMaxStart = uint64_t{1} << 40;
constexpr double kMaxReal = 1e6;

absl::StatusOr<DType> ParseWire(absl::string_view text) {
  for (const DType type : kWireTypes) {
    if (text == Name(type)) return type;
  }
  return absl::InvalidArgumentError("expected fp32, fp16 or bf16");
}

// Reads one value into a field; the error says what was expected.
using Setter = std::function<absl::Status(absl::string_view)>;

template <typename T>
Setter Integer(T* field, T min, T max) {
  return [=](absl::string_view text) -> absl::Status {
    T value = 0;
    if (absl::SimpleAtoi(text, &value) && value >= min && value <= max) {
      *field = value;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("expected ", min, " to ", max));
  };
}

Setter Real(double* field, double min) {
  return [=](absl::string_view text) -> absl::Status {
    double value = 0;
    if (absl::SimpleAtod(text, &value) && value >= min && value <= kMaxReal) {
      *field = value;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("expected ", min, " to ", kMaxReal));
  };
}

Setter Flag(bool* field) {
  return [=](absl::string_view text) -> absl::Status {
    if (text != "0" && text != "1") return absl::InvalidArgumentError("expected 0 or 1");
    *field = text == "1";
    return absl::OkStatus();
  };
}

std::vector<std::pair<std::string, Setter>> PowerSgdKeys(CodecSpec* spec) {
  return {{"rank", Integer<uint32_t>(&spec->rank, 1, kMaxRank)},
          {"start", Integer<uint64_t>(&spec->start, 0, kMaxStart)},
          {"min_rate", Real(&spec->min_rate, 0)},
          {"wire",
           [=](absl::string_view text) -> absl::Status {
             THALWEG_ASSIGN_OR_RETURN(spec->wire, ParseWire(text));
             return absl::OkStatus();
           }},
          {"warm", Flag(&spec->warm)},
          {"feedback", Flag(&spec->feedback)},
          {"seed", Integer<uint64_t>(&spec->seed, 0, std::numeric_limits<uint64_t>::max())},
          {"epsilon", Real(&spec->epsilon, 0)}};
}

absl::Status Wrong(absl::string_view text, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("codec '", text, "': ", why));
}

}  // namespace

absl::StatusOr<CodecSpec> CodecSpec::Parse(absl::string_view text) {
  CodecSpec spec;
  const std::pair<absl::string_view, absl::string_view> split =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  const auto& [name, arguments] = split;
  if (const auto wire = ParseWire(name); wire.ok() && name == text) {
    spec.wire = *wire;
    return spec;
  }
  if (name != "powersgd") {
    return Wrong(text, "expected fp32, fp16, bf16 or powersgd:rank=4,start=1000,…");
  }
  spec.kind = CodecKind::kPowerSgd;
  const auto keys = PowerSgdKeys(&spec);
  for (absl::string_view part : absl::StrSplit(arguments, ',', absl::SkipEmpty())) {
    std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    if (part == arguments && part.find('=') == absl::string_view::npos) pair = {"rank", part};
    const Setter* setter = nullptr;
    for (const auto& [key, set] : keys) {
      if (key == pair.first) setter = &set;
    }
    if (setter == nullptr) {
      const auto key_of = [](std::string* out, const auto& key) { out->append(key.first); };
      return Wrong(text, absl::StrCat("unknown key '", pair.first, "', known are ",
                                      absl::StrJoin(keys, ", ", key_of)));
    }
    if (const absl::Status status = (*setter)(pair.second); !status.ok()) {
      return Wrong(text, absl::StrCat(pair.first, " is '", pair.second, "', ", status.message()));
    }
  }
  return spec;
}

std::string CodecSpec::ToString() const {
  if (kind == CodecKind::kCast) return Name();
  return absl::StrCat("powersgd:rank=", rank, ",start=", start, ",min_rate=", min_rate,
                      ",wire=", thalweg::Name(wire), ",warm=", warm ? 1 : 0,
                      ",feedback=", feedback ? 1 : 0, ",seed=", seed, ",epsilon=", epsilon);
}

std::string CodecSpec::Name() const {
  return kind == CodecKind::kCast ? thalweg::Name(wire) : "powersgd";
}

DType DenseType(DType bucket, const CodecSpec& codec) {
  return bucket == DType::kFloat32 ? codec.wire : bucket;
}

DType ShareType(DType bucket, const CodecSpec& codec, uint32_t workers_on_node) {
  const bool narrowed = workers_on_node == 1 && codec.kind == CodecKind::kCast;
  return narrowed ? DenseType(bucket, codec) : bucket;
}

}  // namespace thalweg
