#include "client/core/pinned_path.h"

#include <fcntl.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/copies_in_flight.h"
#include "core/base/mutex.h"
#include "core/base/status_macros.h"
#include "core/base/unique_fd.h"

namespace thalweg {
namespace {

// A copy has at least this size if the bucket has. Each copy costs four calls, some 10 µs of the
// hook's time, and takes 160 µs on a PCIe 4 link; the sidecar can start when the first has arrived.
constexpr uint64_t kPieceBytes = 4 << 20;
constexpr uint64_t kPage = 4096;

uint64_t WholePages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Returns whether the device can lock memory like the results': of a sealed file, mapped read-only.
// It tries, because the device's own attributes do not settle it.
bool LocksResults(DeviceRuntime& device) {
  const auto written = BucketArena::Create("thalweg-probe", kPage, true);
  if (!written.ok()) return false;
  const auto read = BucketArena::Open(UniqueFd(fcntl(written->fd(), F_DUPFD_CLOEXEC, 0)), kPage);
  if (!read.ok()) return false;
  const auto access = DeviceRuntime::Access::kReadOnly;
  if (!device.RegisterHost(read->payload(), kPage, access).ok()) return false;
  device.UnregisterHost(read->payload());
  return true;
}

class PinnedLane final : public DevicePath::Lane {
 public:
  PinnedLane(std::shared_ptr<DeviceRuntime> device, std::shared_ptr<BucketArena> input_arena)
      : input(std::move(input_arena)), device_(std::move(device)) {}
  ~PinnedLane() override {
    for (const std::byte* begin : registered_) device_->UnregisterHost(begin);
    for (const DeviceEvent event : {made, copied, arrived}) {
      if (event != nullptr) device_->DestroyEvent(event);
    }
  }

  absl::Status Open() {
    for (DeviceEvent* event : {&made, &copied, &arrived}) {
      THALWEG_ASSIGN_OR_RETURN(*event, device_->CreateEvent());
    }
    return Register(*input, DeviceRuntime::Access::kReadWrite);
  }

  absl::Status Register(const BucketArena& arena, DeviceRuntime::Access access) {
    if (arena.payload_bytes() == 0) return absl::OkStatus();
    const uint64_t bytes = WholePages(arena.payload_bytes());
    const absl::Status status = device_->RegisterHost(arena.payload(), bytes, access);
    if (!status.ok()) {
      return absl::Status(
          status.code(), absl::StrCat("locking ", bytes, " bytes of shared memory for the device: ",
                                      status.message()));
    }
    registered_.push_back(arena.payload());
    return absl::OkStatus();
  }

  const std::shared_ptr<BucketArena> input;
  // Fetched from, the last one now: the sidecar's next process has another. Copies from those
  // before may be in flight.
  std::vector<std::shared_ptr<const BucketArena>> results;
  DeviceEvent made = nullptr;     // recorded when the producer has made the gradient
  DeviceEvent copied = nullptr;   // recorded when a piece is copied
  DeviceEvent arrived = nullptr;  // recorded when the result has arrived
  bool has_result = false;        // `arrived` has been recorded

 private:
  const std::shared_ptr<DeviceRuntime> device_;
  std::vector<const std::byte*> registered_;
};

// A Piece is the argument of a function on a stream.
struct Piece {
  BucketArena* input = nullptr;
  uint32_t chunks_ready = 0;
  CopiesInFlight::Copy* last_of = nullptr;  // the copy that ends with this piece
};

}  // namespace

struct PinnedPath::Shared {
  explicit Shared(std::shared_ptr<DeviceRuntime> runtime)
      : device(std::move(runtime)), locks_results(LocksResults(*device)) {}
  ~Shared() { DestroyStreams(); }
  void DestroyStreams() {
    for (DeviceStream* stream : {&out, &notify, &in}) {
      if (*stream != nullptr) device->DestroyStream(std::exchange(*stream, nullptr));
    }
  }

  absl::Status QueuePieces(const PinnedLane& lane, std::span<Piece> pieces,
                           const DeviceGradient& gradient, const ChunkPlan& plan);
  static void Publish(void* piece);  // runs on a stream

  const std::shared_ptr<DeviceRuntime> device;
  DeviceStream out = nullptr;
  DeviceStream notify = nullptr;
  DeviceStream in = nullptr;
  const bool locks_results;

  CopiesInFlight copies;
  std::optional<bool> closed;  // outcome of Close
};

void PinnedPath::Shared::Publish(void* piece) {
  const Piece p = *static_cast<const Piece*>(piece);
  p.input->PublishReady(p.chunks_ready);
  if (p.last_of != nullptr) CopiesInFlight::Finish(p.last_of);
}

absl::StatusOr<std::unique_ptr<PinnedPath>> PinnedPath::Create(
    std::shared_ptr<DeviceRuntime> device) {
  auto shared = std::make_unique<Shared>(std::move(device));
  for (DeviceStream* stream : {&shared->out, &shared->notify, &shared->in}) {
    THALWEG_ASSIGN_OR_RETURN(*stream, shared->device->CreateStream());
  }
  return std::unique_ptr<PinnedPath>(new PinnedPath(std::move(shared)));
}

PinnedPath::PinnedPath(std::unique_ptr<Shared> shared) : shared_(std::move(shared)) {}

PinnedPath::~PinnedPath() {
  if (!Close(Now())) LeaveBehind(std::move(shared_));
}

void PinnedPath::LeaveBehind(std::unique_ptr<Shared> shared) {
  static Mutex mutex;
  static auto* const left_behind = new std::vector<std::unique_ptr<Shared>>();
  MutexLock lock(mutex);
  left_behind->push_back(std::move(shared));
}

absl::StatusOr<std::shared_ptr<DevicePath::Lane>> PinnedPath::OpenLane(
    std::shared_ptr<BucketArena> input, uint64_t /*bytes*/) {
  auto lane = std::make_shared<PinnedLane>(shared_->device, std::move(input));
  THALWEG_RETURN_IF_ERROR(lane->Open());
  return lane;
}

absl::Status PinnedPath::SetResult(Lane& /*lane*/, const DeviceMemory& memory) {
  if (memory == DeviceMemory()) return absl::OkStatus();
  return absl::InvalidArgumentError("the sidecar keeps the result on a GPU, expected an arena");
}

absl::Status PinnedPath::Shared::QueuePieces(const PinnedLane& lane, std::span<Piece> pieces,
                                             const DeviceGradient& gradient,
                                             const ChunkPlan& plan) {
  THALWEG_RETURN_IF_ERROR(device->Record(lane.made, gradient.producer));
  THALWEG_RETURN_IF_ERROR(device->Wait(out, lane.made));
  // See Fetch. Without this wait, the sidecar would overwrite the last round's result too early
  // when the framework's producer does not wait for it.
  if (lane.has_result) THALWEG_RETURN_IF_ERROR(device->Wait(out, lane.arrived));
  const uint64_t elem_bytes = gradient.bytes.size() / plan.total_elems;
  uint64_t begin = 0;
  // The last piece, and with it the copy, may be done before its Launch has returned.
  for (size_t i = 0, count = pieces.size(); i < count; ++i) {
    const uint64_t end = plan.Begin(pieces[i].chunks_ready) * elem_bytes;
    THALWEG_RETURN_IF_ERROR(device->CopyToHost(lane.input->payload() + begin,
                                               gradient.bytes.data() + begin, end - begin, out));
    THALWEG_RETURN_IF_ERROR(device->Record(lane.copied, out));
    THALWEG_RETURN_IF_ERROR(device->Wait(notify, lane.copied));
    THALWEG_RETURN_IF_ERROR(device->Launch(notify, &Publish, &pieces[i]));
    begin = end;
  }
  return absl::OkStatus();
}

absl::Status PinnedPath::Send(const std::shared_ptr<Lane>& lane, const DeviceGradient& gradient,
                              const ChunkPlan& plan) {
  const auto& pinned = static_cast<const PinnedLane&>(*lane);
  shared_->copies.Reap();
  if (plan.total_elems == 0) return absl::OkStatus();
  const auto pieces = std::make_shared<std::vector<Piece>>();
  const uint64_t elem_bytes = gradient.bytes.size() / plan.total_elems;
  uint64_t begin = 0;
  for (uint32_t chunk = 0; chunk < plan.Count(); ++chunk) {
    const uint64_t end = plan.Begin(chunk + 1);
    if (chunk + 1 < plan.Count() && (end - begin) * elem_bytes < kPieceBytes) continue;
    pieces->push_back({pinned.input.get(), chunk + 1});
    begin = end;
  }
  THALWEG_ASSIGN_OR_RETURN(pieces->back().last_of,
                           shared_->copies.Begin({lane, gradient.owner, pieces}));
  const absl::Status status = shared_->QueuePieces(pinned, *pieces, gradient, plan);
  if (!status.ok()) shared_->copies.Break();
  return status;
}

absl::StatusOr<DeviceEvent> PinnedPath::Fetch(const std::shared_ptr<Lane>& lane,
                                              std::shared_ptr<const BucketArena> result,
                                              const DeviceGradient& gradient) {
  auto& pinned = static_cast<PinnedLane&>(*lane);
  Shared& shared = *shared_;
  DeviceRuntime& device = *shared.device;
  shared.copies.Reap();
  if (pinned.results.empty() || pinned.results.back() != result) {
    if (shared.locks_results) {
      THALWEG_RETURN_IF_ERROR(pinned.Register(*result, DeviceRuntime::Access::kReadOnly));
    }
    pinned.results.push_back(std::move(result));
  }
  THALWEG_ASSIGN_OR_RETURN(CopiesInFlight::Copy* const copy,
                           shared.copies.Begin({lane, gradient.owner}));
  const auto queue = [&]() -> absl::Status {
    if (!gradient.bytes.empty()) {
      THALWEG_RETURN_IF_ERROR(device.CopyToDevice(gradient.bytes.data(),
                                                  pinned.results.back()->payload(),
                                                  gradient.bytes.size(), shared.in));
    }
    THALWEG_RETURN_IF_ERROR(device.Record(pinned.arrived, shared.in));
    return device.Launch(shared.in, &CopiesInFlight::Finish, copy);
  };
  if (const absl::Status status = queue(); !status.ok()) {
    shared.copies.Break();
    return status;
  }
  pinned.has_result = true;
  return pinned.arrived;
}

absl::Status PinnedPath::Check() const { return shared_->device->Check(shared_->in); }

GradientPath PinnedPath::path() const {
  return shared_->locks_results ? GradientPath::kPinned : GradientPath::kPageable;
}

bool PinnedPath::Close(TimePoint deadline) {
  Shared& shared = *shared_;
  if (shared.closed.has_value()) return *shared.closed;
  shared.closed = shared.copies.Close(*shared.device, shared.in, deadline);
  if (*shared.closed) shared.DestroyStreams();
  return *shared.closed;
}

}  // namespace thalweg
