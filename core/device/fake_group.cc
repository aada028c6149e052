#include "core/device/fake_group.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// These functions convert the 16-bit types by the number of their mantissa bits, in plain
// arithmetic.
double Widen(uint16_t bits, int mantissa) {
  const int bias = (1 << (14 - mantissa)) - 1;
  const int magnitude = bits & 0x7fff;
  const int exponent = magnitude >> mantissa;
  const int fraction = magnitude & ((1 << mantissa) - 1);
  double value = 0;
  if (exponent == 2 * bias + 1) {
    value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias - mantissa);
  } else {
    value = std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

uint16_t Narrow(double value, int mantissa) {
  const int bias = (1 << (14 - mantissa)) - 1;
  const int infinity = (2 * bias + 1) << mantissa;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
  const int least = 1 - bias;
  const int exponent = magnitude == 0 ? least : std::max(least, std::ilogb(magnitude));
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa - exponent));
  const double bits = steps + std::ldexp(exponent - least, mantissa);
  return static_cast<uint16_t>(sign | (bits < infinity ? static_cast<int>(bits) : infinity));
}

template <class T>
void Add(T* to, const T* from, uint64_t elems) {
  for (uint64_t i = 0; i < elems; ++i) to[i] += from[i];
}

void AddNarrow(uint16_t* to, const uint16_t* from, uint64_t elems, int mantissa) {
  for (uint64_t i = 0; i < elems; ++i) {
    to[i] = Narrow(Widen(to[i], mantissa) + Widen(from[i], mantissa), mantissa);
  }
}

void Add(DType dtype, std::byte* to, const std::byte* from, uint64_t elems) {
  switch (dtype) {
    case DType::kFloat32:
      return Add(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), elems);
    case DType::kFloat64:
      return Add(reinterpret_cast<double*>(to), reinterpret_cast<const double*>(from), elems);
    case DType::kFloat16:
    case DType::kBFloat16:
      return AddNarrow(reinterpret_cast<uint16_t*>(to), reinterpret_cast<const uint16_t*>(from),
                       elems, dtype == DType::kFloat16 ? 10 : 7);
    default:
      return;  // gradients are floats
  }
}

}  // namespace

struct FakeGroup::Operation {
  uint64_t number = 0;  // from 1
  std::vector<Member> members;
  uint64_t bytes = 0;
  Body body;
  size_t arrived = 0;  // guarded by the group's mutex
  Mutex mutex;
  bool is_done ABSL_GUARDED_BY(mutex) = false;
};

struct FakeGroup::Shared {
  explicit Shared(std::vector<FakeRuntime*> members) : gpus(std::move(members)) {}

  void Arrive(Operation& operation) {
    {
      MutexLock lock(mutex);
      ++operation.arrived;
    }
    LookAgain();
  }
  // Requires that a device's mutex is held.
  bool MayBegin(const Operation& operation) {
    MutexLock lock(mutex);
    if (is_aborted) return true;
    return !hangs && failure.ok() && operation.arrived == gpus.size() &&
           done + 1 >= operation.number;
  }
  void Do(Operation& operation);
  void LookAgain() {
    for (FakeRuntime* const gpu : gpus) gpu->LookAgain();
  }

  const std::vector<FakeRuntime*> gpus;
  Mutex order;  // order of calls, the same on all devices
  Mutex mutex;
  bool hangs ABSL_GUARDED_BY(mutex) = false;
  bool is_aborted ABSL_GUARDED_BY(mutex) = false;
  uint64_t done ABSL_GUARDED_BY(mutex) = 0;
  absl::Status failure ABSL_GUARDED_BY(mutex);
  absl::Status to_fail ABSL_GUARDED_BY(mutex);
  std::vector<size_t> roots ABSL_GUARDED_BY(mutex);
  std::vector<std::string> violations ABSL_GUARDED_BY(mutex);
};

void FakeGroup::Shared::Do(Operation& operation) {
  // One stream does the work; the streams of the other members wait until it is done.
  MutexLock once(operation.mutex);
  {
    MutexLock lock(mutex);
    if (is_aborted) return;
  }
  if (std::exchange(operation.is_done, true)) return;
  std::vector<std::byte*> inside;
  for (size_t i = 0; i < gpus.size(); ++i) {
    auto* const memory = static_cast<std::byte*>(operation.members[i].memory);
    inside.push_back(gpus[i]->Inside({memory, operation.bytes}).data());
    if (inside.back() != nullptr) continue;
    MutexLock lock(mutex);
    violations.emplace_back("a member's memory is not its device's, or has been freed");
    return;
  }
  operation.body(inside);
  {
    MutexLock lock(mutex);
    done = operation.number;
  }
  LookAgain();
}

FakeGroup::FakeGroup(std::vector<FakeRuntime*> gpus)
    : shared_(std::make_shared<Shared>(std::move(gpus))) {}

FakeGroup::~FakeGroup() = default;

absl::Status FakeGroup::Queue(std::span<const Member> members, size_t root, uint64_t bytes,
                              Body body) {
  const auto shared = shared_;
  MutexLock ordered(shared->order);
  const auto operation = std::make_shared<Operation>();
  operation->members.assign(members.begin(), members.end());
  operation->bytes = bytes;
  operation->body = std::move(body);
  {
    MutexLock lock(shared->mutex);
    THALWEG_RETURN_IF_ERROR(shared->failure);
    if (members.size() != shared->gpus.size()) {
      shared->violations.emplace_back("a call did not name all members: it would hang");
      return absl::InvalidArgumentError("fake: not all members");
    }
    shared->failure = std::exchange(shared->to_fail, absl::OkStatus());
    THALWEG_RETURN_IF_ERROR(shared->failure);
    shared->roots.push_back(root);
    operation->number = shared->roots.size();
  }
  for (size_t i = 0; i < members.size(); ++i) {
    FakeRuntime& gpu = *shared->gpus[i];
    gpu.Run(members[i].stream, [shared, operation] { shared->Arrive(*operation); });
    gpu.RunWhen(
        members[i].stream, [shared, operation] { return shared->MayBegin(*operation); },
        [shared, operation] { shared->Do(*operation); });
  }
  return absl::OkStatus();
}

absl::Status FakeGroup::Reduce(std::span<const Member> members, size_t root, DType dtype,
                               uint64_t elems) {
  const uint64_t bytes = elems * SizeOf(dtype);
  return Queue(members, root, bytes, [=](const std::vector<std::byte*>& inside) {
    std::vector<std::byte> sum(inside[0], inside[0] + bytes);
    for (size_t i = 1; i < inside.size(); ++i) Add(dtype, sum.data(), inside[i], elems);
    std::memcpy(inside[root], sum.data(), bytes);
  });
}

absl::Status FakeGroup::Broadcast(std::span<const Member> members, size_t root, uint64_t bytes) {
  return Queue(members, root, bytes, [=](const std::vector<std::byte*>& inside) {
    for (size_t i = 0; i < inside.size(); ++i) {
      if (i != root) std::memcpy(inside[i], inside[root], bytes);
    }
  });
}

absl::Status FakeGroup::Check() {
  MutexLock lock(shared_->mutex);
  return shared_->failure;
}

void FakeGroup::Fail(const absl::Status& why) {
  MutexLock lock(shared_->mutex);
  if (shared_->failure.ok()) shared_->failure = why;
}

void FakeGroup::Abort() {
  {
    MutexLock lock(shared_->mutex);
    shared_->is_aborted = !shared_->failure.ok();
  }
  shared_->LookAgain();
}

void FakeGroup::FailCall(absl::Status error) {
  MutexLock lock(shared_->mutex);
  shared_->to_fail = std::move(error);
}

void FakeGroup::Hang() {
  MutexLock lock(shared_->mutex);
  shared_->hangs = true;
}

std::vector<size_t> FakeGroup::roots() {
  MutexLock lock(shared_->mutex);
  return shared_->roots;
}

std::vector<std::string> FakeGroup::violations() {
  MutexLock lock(shared_->mutex);
  return shared_->violations;
}

}  // namespace thalweg
