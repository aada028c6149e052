#include "client/torch/process_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <ranges>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/torch/collective_tensors.h"
#include "client/torch/tensor.h"
#include "core/base/clock.h"

namespace thalweg {
using c10d::OpType;
using c10d::ReduceOp;

namespace {

// Requires that this rank's own tensor is as large as what the call lists for it.
void CheckSize(int rank, const at::Tensor& mine, const at::Tensor& listed, const char* what,
               const char* does, const char* lists) {
  if (mine.numel() == listed.numel()) return;
  Throw(absl::StrCat(what, ": rank ", rank, " of the group ", does, " ", mine.numel(),
                     " elements, but ", lists, " ", listed.numel()));
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Session> session, const WorkerGroup& group,
                           c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
    : Backend(static_cast<int>(group.rank), static_cast<int>(group.nodes.size())),
      session_(std::move(session)),
      group_(group),
      store_(std::move(store)),
      options_(c10::make_intrusive<Options>("thalweg", timeout)) {
  const absl::Status known = session_->MakeGroup(group_);
  if (!known.ok()) Throw(std::string(known.message()));
}

c10::intrusive_ptr<ProcessGroup> ProcessGroup::MakePart(c10d::Store& store,
                                                        const std::vector<int>& ranks,
                                                        const std::string& name,
                                                        std::chrono::milliseconds timeout) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  if (store_ == nullptr) Throw(absl::StrCat("group '", group_.name, "' cannot be split"));
  WorkerGroup part{
      .number = 0, .rank = static_cast<uint32_t>(mine - ranks.begin()), .nodes = {}, .name = name};
  for (const int rank : ranks) part.nodes.push_back(group_.nodes.at(rank));
  uint64_t before = 0;  // torch asks once for each type of device
  {
    MutexLock lock(mutex_);
    before = parts_[name]++;
  }
  // Under torchrun, the store has what process groups before this one have left.
  const std::string key = absl::StrCat("thalweg/number/", session_->job(), "/", name, "/", before);
  if (part.rank == 0) store.set(key, std::to_string(kAll + store_->add("thalweg/groups", 1)));
  store.wait({key}, timeout);
  part.number = static_cast<uint32_t>(std::stoul(store.get_to_str(key)));
  return c10::make_intrusive<ProcessGroup>(session_, part, store_, timeout);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Backend::Options>& options) {
  const std::string name =
      options->group_name.empty() ? absl::StrCat("part of ", group_.name) : options->group_name;
  return MakePart(*store, ranks, name, options->timeout);
}

void ProcessGroup::CheckRoot(int64_t root, const char* what) const {
  if (root < 0 || root >= getSize()) {
    Throw(absl::StrCat(what, " has root ", root, ", but the group has ", getSize(), " ranks"));
  }
}

ProcessGroup::Part ProcessGroup::FoldPart(CollectiveKind kind, const ReduceOp& op, Tensors given,
                                          Tensors got) const {
  CheckOneType(given, got, Name(kind));  // before complex numbers are taken for pairs
  const at::ScalarType type = given.at(0).scalar_type();
  const bool is_complex = given[0].is_complex();
  const at::ScalarType folded = is_complex ? c10::toRealValueType(type) : type;
  const std::string what =
      absl::StrCat(Name(kind), " with ", NameOf(op), " of ", c10::toString(type));
  const std::optional<DType> dtype = DTypeOf(folded);
  if (!dtype) Throw(absl::StrCat(what, " is not supported"));
  const Fold fold = FoldOf(op, folded);
  if (IsBitwise(fold) && IsFloat(*dtype))
    Throw(absl::StrCat(what, ": bits are folded of integers"));
  if (fold == Fold::kMean && !IsFloat(*dtype)) {
    Throw(absl::StrCat(what, ": integers have no exact mean; take the sum and divide"));
  }
  if (is_complex && fold != Fold::kSum && fold != Fold::kMean) {
    Throw(absl::StrCat(what, " is not supported: complex numbers are summed or averaged"));
  }
  Part part{.kind = kind, .fold = fold, .factor = FactorOf(op)};
  if (part.factor != 1 && !IsFloat(*dtype)) Throw(absl::StrCat(what, ": expected floats"));
  for (const at::Tensor& tensor : given) part.given.push_back(AsReal(tensor));
  for (const at::Tensor& tensor : got) part.got.push_back(AsReal(tensor));
  return part;
}

c10::intrusive_ptr<CollectiveWork> ProcessGroup::MakeWork(OpType type, const Tensors& inputs,
                                                          Tensors outputs, size_t count) {
  const auto work = c10::make_intrusive<CollectiveWork>(getRank(), type, inputs, std::move(outputs),
                                                        count, ++sequence_);
  work->BeforeWait([weak = std::weak_ptr(session_), thread = session_->CompletionThreadHere()] {
    const auto session = weak.lock();
    return session == nullptr ? absl::OkStatus() : session->BeforeWait(thread);
  });
  return work;
}

ProcessGroup::WorkPtr ProcessGroup::Begin(OpType type, std::vector<Part> parts, Tensors outputs,
                                          std::chrono::milliseconds timeout,
                                          std::function<void()> then) {
  Tensors inputs;
  for (const Part& part : parts) {
    CheckOneType(part.given, part.got, Name(part.kind));
    inputs.insert(inputs.end(), part.given.begin(), part.given.end());
  }
  const auto work = MakeWork(type, inputs, std::move(outputs), std::max<size_t>(1, parts.size()));
  if (parts.empty()) {
    work->FinishOne(absl::OkStatus());
    return work;
  }
  if (timeout == c10d::kUnsetTimeout) timeout = options_->timeout;
  std::vector<CollectiveCall> calls;
  CallMemory memory;
  for (const Part& part : parts) {
    CollectiveCall& call = calls.emplace_back();
    call.group = group_.number;
    call.kind = part.kind;
    call.fold = part.fold;
    call.root = static_cast<uint32_t>(part.root);
    call.timeout = Bounded(timeout);
    for (const at::Tensor& tensor : part.given) {
      call.given.push_back(memory.Given(part.factor == 1 ? tensor : tensor * part.factor));
    }
    for (const at::Tensor& tensor : part.got) call.got.push_back(memory.Got(tensor));
    uint64_t bytes = 0;
    if (!part.given.empty() || !part.got.empty()) {
      const at::ScalarType scalar = (part.given.empty() ? part.got : part.given)[0].scalar_type();
      call.dtype = part.fold == Fold::kNone ? DType::kUInt8 : *DTypeOf(scalar);
      const auto sum = [](const auto& pieces) {
        uint64_t total = 0;
        for (const auto& piece : pieces) total += piece.size();
        return total;
      };
      const auto size = static_cast<uint32_t>(getSize());
      const bool is_root = part.root == getRank();
      const uint64_t units = UnitsGiven(part.kind, size, is_root);
      bytes = units > 0 ? sum(call.given) / units
                        : sum(call.got) / std::max<uint64_t>(1, UnitsGot(part.kind, size, is_root));
    }
    call.elems = bytes / SizeOf(call.dtype);
  }
  memory.Attach(*work, std::move(then));
  for (CollectiveCall& call : calls) {
    session_->Collect(std::move(call),
                      [work](const absl::Status& status) { work->FinishOne(status); });
  }
  return work;
}

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = Only(tensors, "broadcast");
  CheckRoot(options.rootRank, "broadcast");
  Part part{.kind = CollectiveKind::kBroadcast, .root = options.rootRank};
  (options.rootRank == getRank() ? part.given : part.got).push_back(tensor);
  return Begin(OpType::BROADCAST, {part}, tensors, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return AllReduceSparse(tensors[0], options);
  const at::Tensor& tensor = Only(tensors, "allreduce");
  return Begin(OpType::ALLREDUCE,
               {FoldPart(CollectiveKind::kAllReduce, options.reduceOp, {tensor}, {tensor})},
               tensors, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    CheckTensor(tensor, "allreduce");
    parts.push_back(FoldPart(CollectiveKind::kAllReduce, options.reduceOp, {tensor}, {tensor}));
  }
  return Begin(OpType::ALLREDUCE_COALESCED, std::move(parts), tensors, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = Only(tensors, "reduce");
  CheckRoot(options.rootRank, "reduce");
  const bool is_root = options.rootRank == getRank();
  Part part = FoldPart(CollectiveKind::kReduce, options.reduceOp, {tensor},
                       is_root ? Tensors{tensor} : Tensors{});
  part.root = options.rootRank;
  return Begin(OpType::REDUCE, {std::move(part)}, tensors, options.timeout);
}

ProcessGroup::Part ProcessGroup::GatherPart(const at::Tensor& input, Tensors outputs) const {
  CheckTensor(input, "allgather");
  if (outputs.size() != static_cast<size_t>(getSize())) {
    Throw(absl::StrCat("allgather into ", outputs.size(), " tensors, expected one for each of ",
                       getSize(), " ranks"));
  }
  for (const at::Tensor& output : outputs) CheckTensor(output, "allgather");
  const int64_t elems = LargestOf(outputs);
  CheckSize(getRank(), input, outputs[getRank()], "allgather", "gives", "the output for it has");
  return {.kind = CollectiveKind::kAllGather,
          .given = Padded({input}, elems),
          .got = Padded(outputs, elems)};
}

ProcessGroup::WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const at::Tensor& input = Only(inputs, "allgather");
  if (outputs.size() != 1) {
    Throw(absl::StrCat("allgather of one tensor into ", outputs.size(), " lists of tensors"));
  }
  return Begin(OpType::ALLGATHER, {GatherPart(input, outputs[0])}, outputs[0], options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  std::vector<Part> parts;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (const Tensors& of_rank : outputs) {
      if (of_rank.size() != inputs.size()) {
        Throw(absl::StrCat("allgather of ", inputs.size(), " tensors into ", of_rank.size(),
                           " of one rank"));
      }
      all.push_back(of_ranks.emplace_back(of_rank[i]));
    }
    parts.push_back(GatherPart(inputs[i], std::move(of_ranks)));
  }
  return Begin(OpType::ALLGATHER_COALESCED, std::move(parts), std::move(all), options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  CheckPairs(inputs, outputs, "all_gather_into_tensor");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (outputs[i].numel() != inputs[i].numel() * getSize()) {
      Throw(absl::StrCat("all_gather_into_tensor of ", inputs[i].numel(), " elements on ",
                         getSize(), " ranks into ", outputs[i].numel()));
    }
    parts.push_back(
        {.kind = CollectiveKind::kAllGather, .given = {inputs[i]}, .got = {outputs[i]}});
  }
  return Begin(OpType::_ALLGATHER_BASE, std::move(parts), outputs, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor& input = Only(inputs, "gather");
  CheckRoot(options.rootRank, "gather");
  Part part{.kind = CollectiveKind::kGather, .root = options.rootRank, .given = {input}};
  if (options.rootRank == getRank()) {
    if (outputs.size() != 1 || outputs[0].size() != static_cast<size_t>(getSize())) {
      Throw(absl::StrCat("gather takes a list of one tensor for each of ", getSize(),
                         " ranks at its root"));
    }
    for (const at::Tensor& output : outputs[0]) {
      CheckTensor(output, "gather");
      if (output.numel() != input.numel()) Throw("gather takes tensors of one size");
    }
    part.got = outputs[0];
  }
  Tensors all = part.got;
  return Begin(OpType::GATHER, {std::move(part)}, std::move(all), options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor& output = Only(outputs, "scatter");
  CheckRoot(options.rootRank, "scatter");
  Part part{.kind = CollectiveKind::kScatter, .root = options.rootRank, .got = {output}};
  if (options.rootRank == getRank()) {
    if (inputs.size() != 1 || inputs[0].size() != static_cast<size_t>(getSize())) {
      Throw(absl::StrCat("scatter takes a list of one tensor for each of ", getSize(),
                         " ranks at its root"));
    }
    for (const at::Tensor& input : inputs[0]) {
      CheckTensor(input, "scatter");
      if (input.numel() != output.numel()) Throw("scatter takes tensors of one size");
    }
    part.given = inputs[0];
  }
  return Begin(OpType::SCATTER, {std::move(part)}, outputs, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = Only(outputs, "reduce_scatter");
  if (inputs.size() != 1 || inputs[0].size() != static_cast<size_t>(getSize())) {
    Throw(absl::StrCat("reduce_scatter takes a list of one tensor for each of ", getSize(),
                       " ranks"));
  }
  const int64_t elems = LargestOf(inputs[0]);
  for (const at::Tensor& input : inputs[0]) CheckTensor(input, "reduce_scatter");
  CheckSize(getRank(), output, inputs[0][getRank()], "reduce_scatter", "gets",
            "the input for it has");
  return Begin(OpType::REDUCE_SCATTER,
               {FoldPart(CollectiveKind::kReduceScatter, options.reduceOp, Padded(inputs[0], elems),
                         Padded({output}, elems))},
               outputs, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  CheckPairs(inputs, outputs, "reduce_scatter_tensor");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].numel() != outputs[i].numel() * getSize()) {
      Throw(absl::StrCat("reduce_scatter_tensor of ", inputs[i].numel(), " elements on ", getSize(),
                         " ranks into ", outputs[i].numel()));
    }
    parts.push_back(
        FoldPart(CollectiveKind::kReduceScatter, options.reduceOp, {inputs[i]}, {outputs[i]}));
  }
  return Begin(OpType::_REDUCE_SCATTER_BASE, std::move(parts), outputs, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  WorkPtr work = Begin(OpType::BARRIER, {Part{}}, {}, options.timeout);
  if (!options.asyncOp) work->wait();
  return work;
}

void ProcessGroup::abort() {
  session_->Abort(group_.number == kAll ? "it has aborted the job"
                                        : absl::StrCat("it has aborted group '", group_.name,
                                                       "' and with it the job"));
}

void ProcessGroup::AtShutdown(std::function<void()> listener) {
  MutexLock lock(mutex_);
  at_shutdown_.push_back(std::move(listener));
}

void ProcessGroup::shutdown() {
  std::vector<std::function<void()>> listeners;
  {
    MutexLock lock(mutex_);
    const bool ends_something = group_.number == kAll || !at_shutdown_.empty();
    if (ends_something && session_->IsCompletionThread()) {
      Throw(
          "destroy_process_group() was called in a callback of a work: call it on the thread that "
          "trains");
    }
    listeners.swap(at_shutdown_);
  }
  for (const auto& listener : std::views::reverse(listeners)) listener();
  if (group_.number == kAll) session_->Close();
}

}  // namespace thalweg
