#include "kernels/optim/optim_plan.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "kernels/optim/optim_launch.h"

namespace thalweg {
namespace {

// This makes tables of equal tensors equal bytes.
static_assert(std::has_unique_object_representations_v<OptimEntry>);

struct Array {
  const char* name;
  const void* data;
  DType type;
};

// Returns the arrays that a tensor has.
std::vector<Array> ArraysOf(const DeviceTensor& tensor) {
  std::vector<Array> arrays;
  const auto add = [&arrays](const char* name, const void* data, DType type) {
    if (data != nullptr) arrays.push_back({name, data, type});
  };
  add("parameter", tensor.param, tensor.param_type);
  add("gradient", tensor.grad, tensor.grad_type);
  for (const float* state : tensor.states) add("state", state, DType::kFloat32);
  add("copy", tensor.copy, tensor.copy_type);
  add("step", tensor.step, DType::kFloat32);
  return arrays;
}

absl::Status Check(const DeviceTensor& tensor, size_t number) {
  const auto refuse = [number](const auto&... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer plan: tensor ", number, ": ", what...));
  };
  if (tensor.elems > 0 && (tensor.param == nullptr || tensor.grad == nullptr)) {
    return refuse("expected a parameter and a gradient, got no ",
                  tensor.param == nullptr ? "parameter" : "gradient", "; leave it out");
  }
  for (const Array& array : ArraysOf(tensor)) {
    if (array.type == DType::kFloat64 || !IsValid(array.type)) {
      return refuse("expected a ", array.name, " in fp32, fp16 or bf16, got ", Name(array.type));
    }
    const uint64_t past = reinterpret_cast<uintptr_t>(array.data) % SizeOf(array.type);
    if (past != 0) {
      return refuse("expected a ", array.name, " at a multiple of ", SizeOf(array.type),
                    " bytes, got one ", past, " behind; copy it");
    }
  }
  return absl::OkStatus();
}

// Returns how many elements precede the first one that lies at a multiple of 16 bytes in all
// arrays.
uint8_t HeadOf(const DeviceTensor& tensor) {
  std::vector<Array> arrays = ArraysOf(tensor);
  if (tensor.step != nullptr) arrays.pop_back();
  for (uint8_t head = 0; head < 8; ++head) {
    const auto is_multiple = [head](const Array& array) {
      return (reinterpret_cast<uintptr_t>(array.data) + head * SizeOf(array.type)) % 16 == 0;
    };
    if (std::all_of(arrays.begin(), arrays.end(), is_multiple)) return head;
  }
  return kNoPacks;
}

ElementType ElementTypeOf(DType type) {
  if (type == DType::kFloat16) return ElementType::kFp16;
  return type == DType::kBFloat16 ? ElementType::kBFloat16 : ElementType::kFp32;
}

uint32_t StatesOf(const DeviceTensor& tensor) {
  const auto* const end = std::find(std::begin(tensor.states), std::end(tensor.states), nullptr);
  return static_cast<uint32_t>(end - std::begin(tensor.states));
}

}  // namespace

absl::StatusOr<OptimPlan> OptimPlan::Make(std::span<const DeviceTensor> tensors) {
  OptimPlan plan;
  plan.table_.reserve(tensors.size() * sizeof(OptimEntry));
  for (size_t i = 0; i < tensors.size(); ++i) {
    THALWEG_RETURN_IF_ERROR(Check(tensors[i], i));
    plan.Add(tensors[i]);
  }
  return plan;
}

void OptimPlan::Add(const DeviceTensor& tensor) {
  OptimEntry entry = {};
  entry.first_granule = granules_;
  entry.elems = tensor.elems;
  entry.param = tensor.param;
  entry.grad = tensor.grad;
  std::copy(std::begin(tensor.states), std::end(tensor.states), entry.states);
  entry.copy = tensor.copy;
  entry.step = tensor.step;
  entry.group = tensor.group;
  entry.param_type = ElementTypeOf(tensor.param_type);
  entry.grad_type = ElementTypeOf(tensor.grad_type);
  entry.copy_type = ElementTypeOf(tensor.copy_type);
  entry.head = HeadOf(tensor);
  const size_t before = table_.size();
  table_.resize(before + sizeof(entry));
  std::memcpy(table_.data() + before, &entry, sizeof(entry));
  ++tensors_;
  granules_ += GranulesOf(tensor.elems);
  if (tensor.elems > 0) states_ = std::min(states_, StatesOf(tensor));
  counts_steps_ = counts_steps_ && tensor.step != nullptr;
}

uint64_t OptimPlan::workspace_bytes() const {
  return 2 * sizeof(double) * granules_ + kSkipBytes + kPreparedBytes * tensors_;
}

}  // namespace thalweg
