// ProcessGroup is the back end "thalweg" of torch.distributed: c10d's calls become collectives of a
// Session. docs/c10d.md says what it supports.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "client/core/session.h"
#include "client/torch/call_memory.h"
#include "client/torch/collective_work.h"
#include "client/torch/torch_version.h"
#include "core/base/mutex.h"

namespace thalweg {

// Thread-safe. Calls copy what they give before they return, and write what they get on the
// session's completion thread; tensors on a GPU go through memory of the CPU. They throw
// std::runtime_error for what is not supported, by name.
class ProcessGroup : public c10d::Backend {
 public:
  static constexpr uint32_t kAll = 1;  // the group of all workers, whose shutdown ends the session

  // `store` is that of all workers, which numbers their groups; null: there are no others. Throws
  // what Session::MakeGroup returns.
  ProcessGroup(std::shared_ptr<Session> session, const WorkerGroup& group,
               c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);

  // Returns the group of these ranks of this one, in which the i-th has rank i; null: this worker
  // is none of them. They make it together, and `store` is theirs alone.
  c10::intrusive_ptr<ProcessGroup> MakePart(c10d::Store& store, const std::vector<int>& ranks,
                                            const std::string& name,
                                            std::chrono::milliseconds timeout);
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Backend::Options>& options) override;

  // c10d copies what Python knows of them, up to torch 2.13, and what clone() returns from 2.14 on.
  struct Options : Backend::Options {
    using Backend::Options::Options;
    c10::intrusive_ptr<Backend::Options> clone() const THALWEG_OVERRIDE_FROM_2_14 {
      return c10::make_intrusive<Options>(*this);
    }
  };
  const std::string getBackendName() const override { return "thalweg"; }
  c10::intrusive_ptr<Options> options() const { return options_; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  // outputs[r][i] is what rank r gives as inputs[i].
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  // Closes the session if the group is that of all workers. What AtShutdown() got runs before.
  void shutdown() override;
  // Lets the next shutdown() call `listener`, once, without a lock. The last one is called first.
  void AtShutdown(std::function<void()> listener);

 private:
  // A Part is one collective of a call.
  struct Part {
    CollectiveKind kind = CollectiveKind::kBarrier;
    Fold fold = Fold::kNone;
    double factor = 1;  // of the values, before they are folded
    int64_t root = 0;
    Tensors given = {};
    Tensors got = {};
  };
  // A Parcel is one message of a call.
  struct Parcel {
    PeerCall::Way way = PeerCall::Way::kSend;
    std::optional<uint32_t> peer;  // rank in the group
    uint64_t tag = 0;
    at::Tensor tensor;
  };
  c10::intrusive_ptr<CollectiveWork> MakeWork(c10d::OpType type, const Tensors& inputs,
                                              Tensors outputs, size_t count);
  // Begins a call's collectives, or messages. `outputs` are what its future holds, once `then` has
  // run; null: it does nothing.
  WorkPtr Begin(c10d::OpType type, std::vector<Part> parts, Tensors outputs,
                std::chrono::milliseconds timeout, std::function<void()> then = nullptr);
  WorkPtr BeginParcels(c10d::OpType type, const std::vector<Parcel>& parcels, Tensors outputs,
                       std::chrono::milliseconds timeout);
  // Sends one tensor to each rank, and receives one from each.
  WorkPtr ExchangeAll(c10d::OpType type, Tensors given, Tensors got, Tensors outputs,
                      std::chrono::milliseconds timeout);
  WorkPtr AllReduceSparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  Part FoldPart(CollectiveKind kind, const c10d::ReduceOp& op, Tensors given, Tensors got) const;
  Part GatherPart(const at::Tensor& input, Tensors outputs) const;
  void CheckRoot(int64_t root, const char* what) const;

  const std::shared_ptr<Session> session_;
  const WorkerGroup group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  Mutex mutex_;
  std::map<std::string, uint64_t> parts_ ABSL_GUARDED_BY(mutex_);  // how many there are of a name
  std::vector<std::function<void()>> at_shutdown_ ABSL_GUARDED_BY(mutex_);
  const c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};  // of calls
};

}  // namespace thalweg
