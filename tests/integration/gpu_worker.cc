#include "tests/integration/gpu_worker.h"

#include <cstdlib>
#include <cstring>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "core/base/testing/test_patience.h"

namespace thalweg {
namespace {

// Runs on a thread of the driver.
void Set(void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); }

}  // namespace

absl::StatusOr<std::unique_ptr<GpuWorker>> GpuWorker::Connect(const std::string& socket,
                                                              const Place& place,
                                                              const std::string& codec,
                                                              const BucketLayout& layout) {
  std::unique_ptr<GpuWorker> worker(new GpuWorker(layout.Elems()));
  THALWEG_RETURN_IF_ERROR(worker->Allocate());
  SessionOptions options;
  options.sidecar_path = socket;
  options.job = "job";
  options.rank = place.rank;
  options.world_size = place.nodes * place.workers;
  options.node = place.rank / place.workers;
  options.num_nodes = place.nodes;
  options.node_name = absl::StrCat("host", options.node);
  options.local_rank = place.rank % place.workers;
  options.local_size = place.workers;
  options.chunk_bytes = kChunkBytes;
  THALWEG_ASSIGN_OR_RETURN(options.codec, CodecPolicy::Parse(codec));
  options.timeout = kTestPatience;
  options.device = worker->gpu_;
  THALWEG_ASSIGN_OR_RETURN(worker->session_, Session::Connect(options));
  THALWEG_RETURN_IF_ERROR(worker->session_->RegisterBucket({0, 0}, layout));
  return worker;
}

absl::Status GpuWorker::Allocate() {
  THALWEG_ASSIGN_OR_RETURN(gpu_, OpenCudaDevice(0));
  THALWEG_RETURN_IF_ERROR(gpu_->BindThread());
  for (std::byte** const memory : {&memory_, &other_}) {
    THALWEG_ASSIGN_OR_RETURN(void* const allocated, gpu_->AllocateMemory(bytes_));
    *memory = static_cast<std::byte*>(allocated);
  }
  THALWEG_ASSIGN_OR_RETURN(void* const host, gpu_->AllocateHost(bytes_));
  host_ = static_cast<std::byte*>(host);
  THALWEG_ASSIGN_OR_RETURN(stream_, gpu_->CreateStream());
  return absl::OkStatus();
}

absl::Status GpuWorker::Fill(const std::vector<float>& values) {
  std::memcpy(host_, values.data(), bytes_);
  return gpu_->CopyToDevice(memory_, host_, bytes_, stream_);
}

absl::Status GpuWorker::Fetch() { return gpu_->CopyToHost(host_, memory_, bytes_, stream_); }
absl::Status GpuWorker::Copy() { return gpu_->Copy(other_, memory_, bytes_, stream_); }

absl::Status GpuWorker::Reduce(Duration* call) {
  std::promise<absl::Status> waiting;
  const TimePoint begin = Now();
  session_->SubmitFromDevice(
      {0, 0}, {{memory_, bytes_}, stream_, nullptr}, {},
      [&](const absl::StatusOr<ReducedBucket>& reduced) {
        waiting.set_value(reduced.ok() ? gpu_->Wait(stream_, reduced->arrived) : reduced.status());
      });
  if (call != nullptr) *call = Now() - begin;
  return waiting.get_future().get();  // bounded by the session's timeout
}

absl::Status GpuWorker::Finish() {
  std::promise<void> done;
  THALWEG_RETURN_IF_ERROR(gpu_->Launch(stream_, &Set, &done));
  if (done.get_future().wait_for(kTestPatience) == std::future_status::ready) {
    return gpu_->Check(stream_);
  }
  std::abort();  // the stream still refers to `done`
}

}  // namespace thalweg
