#include "server/sidecar/codec/parameter_states.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

constexpr uint32_t kMagic = 0x33535754;                                  // "TWS3"
constexpr uint32_t kEarlierMagic = 0x32535754;                           // "TWS2"
constexpr size_t kFixedBytes = sizeof(uint32_t) + 4 * sizeof(uint64_t);  // of each

class Writer {
 public:
  explicit Writer(std::span<std::byte> out) : out_(out) {}

  void Add(const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(out_.data(), data, bytes);
    out_ = out_.subspan(bytes);
  }
  template <typename T>
    requires std::is_integral_v<T>
  void Add(T value) {
    Add(&value, sizeof value);
  }

 private:
  std::span<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  size_t left() const { return rest_.size(); }

  absl::Status Take(void* to, size_t bytes) {
    if (bytes > rest_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("codec state is cut off: ", bytes,
                                                     " bytes expected, ", rest_.size(), " left"));
    }
    if (bytes > 0) std::memcpy(to, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return absl::OkStatus();
  }
  // Checked before memory is asked for: the count is the peer's word.
  template <typename Container>
  absl::Status TakeInto(Container& to, uint64_t count) {
    const size_t each = sizeof(typename Container::value_type);
    if (count > rest_.size() / each) {
      return absl::InvalidArgumentError(absl::StrCat(
          "codec state is cut off: ", count, " elements expected, ", rest_.size(), " bytes left"));
    }
    to.resize(count);
    return Take(to.data(), count * each);
  }

 private:
  std::span<const std::byte> rest_;
};

absl::Status TakeParameter(Reader& in, ParameterStates& states) {
  uint32_t name_bytes = 0;
  uint64_t factor = 0, residual = 0, shard_residual = 0;
  std::string name;
  auto state = std::make_shared<ParameterState>();
  state->loss_scale = kNoLossScale;
  THALWEG_RETURN_IF_ERROR(in.Take(&name_bytes, sizeof name_bytes));
  THALWEG_RETURN_IF_ERROR(in.TakeInto(name, name_bytes));
  THALWEG_RETURN_IF_ERROR(in.Take(&state->rounds, sizeof state->rounds));
  THALWEG_RETURN_IF_ERROR(in.Take(&factor, sizeof factor));
  THALWEG_RETURN_IF_ERROR(in.Take(&residual, sizeof residual));
  THALWEG_RETURN_IF_ERROR(in.Take(&shard_residual, sizeof shard_residual));
  THALWEG_RETURN_IF_ERROR(in.TakeInto(state->factor, factor));
  std::vector<float> values;
  THALWEG_RETURN_IF_ERROR(in.TakeInto(values, residual));
  state->residual = std::move(values);
  THALWEG_RETURN_IF_ERROR(in.TakeInto(state->shard_residual, shard_residual));
  if (states.emplace(name, std::move(state)).second) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("codec state has '", name, "' twice"));
}

absl::Status CheckSize(const std::string& name, uint64_t elems, std::span<const float> values) {
  if (values.empty() || values.size() == elems) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("parameter '", name, "' has ", elems,
                                                 " elements, its codec state ", values.size()));
}

}  // namespace

void ToTrueUnits(ParameterStates& states) {
  for (const auto& [name, state] : states) {
    if (ChangesUnits(state->loss_scale, kNoLossScale)) state->residual.Own();
    Rescale(state->residual, state->loss_scale, kNoLossScale);
  }
}

size_t EncodedBytes(const ParameterStates& states) {
  size_t bytes = 2 * sizeof(uint32_t);
  for (const auto& [name, state] : states) {
    const size_t elems =
        state->factor.size() + state->residual.size() + state->shard_residual.size();
    bytes += kFixedBytes + name.size() + elems * sizeof(float);
  }
  return bytes;
}

void Encode(const ParameterStates& states, std::span<std::byte> out) {
  Writer writer(out);
  writer.Add(kMagic);
  writer.Add(static_cast<uint32_t>(states.size()));
  for (const auto& [name, state] : states) {
    writer.Add(static_cast<uint32_t>(name.size()));
    writer.Add(name.data(), name.size());
    writer.Add(state->rounds);
    writer.Add(uint64_t{state->factor.size()});
    writer.Add(uint64_t{state->residual.size()});
    writer.Add(uint64_t{state->shard_residual.size()});
    for (const std::span<const float> values :
         {std::span<const float>(state->factor), std::span<const float>(state->residual),
          std::span<const float>(state->shard_residual)}) {
      writer.Add(values.data(), values.size_bytes());
    }
  }
}

absl::StatusOr<ParameterStates> DecodeParameterStates(std::span<const std::byte> bytes) {
  Reader in(bytes);
  uint32_t magic = 0, count = 0;
  THALWEG_RETURN_IF_ERROR(in.Take(&magic, sizeof magic));
  if (magic == kEarlierMagic) {
    return absl::InvalidArgumentError(
        "codec state was saved by an earlier release, with residuals in units of a loss scale that "
        "it does not name: load it with that release, or begin without it");
  }
  if (magic != kMagic) return absl::InvalidArgumentError("these bytes are no codec state");
  THALWEG_RETURN_IF_ERROR(in.Take(&count, sizeof count));
  ParameterStates states;
  for (uint32_t i = 0; i < count; ++i) THALWEG_RETURN_IF_ERROR(TakeParameter(in, states));
  if (in.left() == 0) return states;
  return absl::InvalidArgumentError(
      absl::StrCat("codec state has ", in.left(), " bytes too many after its last parameter"));
}

absl::StatusOr<std::shared_ptr<ParameterState>> StateOf(ParameterStates& states,
                                                        const TensorSpec& parameter) {
  std::shared_ptr<ParameterState>& state = states[parameter.name];
  if (state == nullptr) state = std::make_shared<ParameterState>();
  THALWEG_RETURN_IF_ERROR(CheckSize(parameter.name, parameter.Elems(), state->residual));
  THALWEG_RETURN_IF_ERROR(CheckSize(parameter.name, parameter.Elems(), state->shard_residual));
  return state;
}

absl::Status Replace(ParameterStates& states, ParameterStates loaded) {
  for (const auto& [name, state] : loaded) {
    const auto known = states.find(name);
    if (known == states.end() || known->second->residual.empty()) continue;
    const size_t elems = known->second->residual.size();
    THALWEG_RETURN_IF_ERROR(CheckSize(name, elems, state->residual));
    THALWEG_RETURN_IF_ERROR(CheckSize(name, elems, state->shard_residual));
  }
  for (const auto& [name, state] : states) loaded.try_emplace(name, nullptr);
  for (auto& [name, state] : loaded) {
    if (state == nullptr) state = std::make_shared<ParameterState>();
    std::shared_ptr<ParameterState>& known = states[name];
    if (known == nullptr) known = std::make_shared<ParameterState>();
    const size_t elems = known->residual.size();
    const std::shared_ptr<ParameterState> taken = std::move(state);
    *known = std::move(*taken);
    if (known->residual.empty()) known->residual.Resize(elems);
  }
  return absl::OkStatus();
}

}  // namespace thalweg
