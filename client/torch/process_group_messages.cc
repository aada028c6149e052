// This file holds the part of ProcessGroup in which ranks speak to single others.
#include <numeric>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/torch/collective_tensors.h"
#include "client/torch/process_group.h"
#include "client/torch/tensor.h"
#include "core/base/clock.h"

namespace thalweg {
using c10d::OpType;

namespace {

// Returns the tag of an all_to_all, of which one follows the other; those that callbacks begin have
// an order of their own. Tags of callers are smaller.
uint64_t TagOfExchange(int lane) { return uint64_t{1 + static_cast<uint32_t>(lane)} << 32; }

uint64_t TagOf(int tag) { return static_cast<uint32_t>(tag); }

}  // namespace

ProcessGroup::WorkPtr ProcessGroup::BeginParcels(OpType type, const std::vector<Parcel>& parcels,
                                                 Tensors outputs,
                                                 std::chrono::milliseconds timeout) {
  Tensors inputs;
  for (const Parcel& parcel : parcels) {
    if (parcel.way == PeerCall::Way::kSend) inputs.push_back(parcel.tensor);
  }
  const auto work = MakeWork(type, inputs, std::move(outputs), parcels.size());
  if (timeout == c10d::kUnsetTimeout) timeout = options_->timeout;
  std::vector<PeerCall> calls;
  CallMemory memory;
  for (const Parcel& parcel : parcels) {
    PeerCall& call = calls.emplace_back();
    call.group = group_.number;
    call.way = parcel.way;
    call.peer = parcel.peer;
    call.tag = parcel.tag;
    call.is_ordered = type == OpType::ALLTOALL || type == OpType::ALLTOALL_BASE;
    call.timeout = Bounded(timeout);
    if (call.way == PeerCall::Way::kSend) {
      call.given = memory.Given(parcel.tensor);
    } else {
      call.got = memory.Got(parcel.tensor);
      call.from = [work](uint32_t rank) { work->NoteSource(rank); };
    }
  }
  memory.Attach(*work);
  for (PeerCall& call : calls) {
    session_->Exchange(std::move(call),
                       [work](const absl::Status& status) { work->FinishOne(status); });
  }
  return work;
}

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = Only(tensors, "send");
  CheckRoot(to, "send");
  return BeginParcels(OpType::SEND,
                      {{PeerCall::Way::kSend, static_cast<uint32_t>(to), TagOf(tag), tensor}}, {},
                      c10d::kUnsetTimeout);
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = Only(tensors, "recv");
  CheckRoot(from, "recv");
  return BeginParcels(OpType::RECV,
                      {{PeerCall::Way::kReceive, static_cast<uint32_t>(from), TagOf(tag), tensor}},
                      tensors, c10d::kUnsetTimeout);
}

ProcessGroup::WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = Only(tensors, "recv");
  return BeginParcels(OpType::RECVANYSOURCE,
                      {{PeerCall::Way::kReceive, std::nullopt, TagOf(tag), tensor}}, tensors,
                      c10d::kUnsetTimeout);
}

ProcessGroup::WorkPtr ProcessGroup::ExchangeAll(OpType type, Tensors given, Tensors got,
                                                Tensors outputs,
                                                std::chrono::milliseconds timeout) {
  CheckOneType(given, got, "all_to_all");
  std::vector<Parcel> parcels;
  const auto size = static_cast<uint32_t>(getSize());
  const auto rank = static_cast<uint32_t>(getRank());
  const uint64_t tag = TagOfExchange(session_->CompletionThreadHere());
  // Each rank begins with its right neighbour, so that no two send to the same one first. All is
  // copied before anything is received, which may go to the same memory.
  for (uint32_t i = 1; i <= size; ++i) {
    const uint32_t to = (rank + i) % size;
    parcels.push_back({PeerCall::Way::kSend, to, tag, given[to]});
  }
  for (uint32_t i = 1; i <= size; ++i) {
    const uint32_t from = (rank + size - i) % size;
    parcels.push_back({PeerCall::Way::kReceive, from, tag, got[from]});
  }
  return BeginParcels(type, parcels, std::move(outputs), timeout);
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_sizes,
                                                  std::vector<int64_t>& input_sizes,
                                                  const c10d::AllToAllOptions& options) {
  CheckTensor(input, "all_to_all_single");
  CheckTensor(output, "all_to_all_single");
  const auto parts_of = [&](const at::Tensor& tensor, std::vector<int64_t> sizes,
                            const char* what) -> Tensors {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (sizes.empty() && rows % getSize() == 0) sizes.assign(getSize(), rows / getSize());
    if (sizes.size() != static_cast<size_t>(getSize()) ||
        std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows) {
      Throw(absl::StrCat("all_to_all_single: the ", what, " has ", rows, " rows, which ",
                         sizes.size(), " parts for ", getSize(), " ranks do not add up to"));
    }
    return (tensor.dim() == 0 ? tensor.view({1}) : tensor).split_with_sizes(sizes);
  };
  const Tensors given = parts_of(input, input_sizes, "input");
  const Tensors got = parts_of(output, output_sizes, "output");
  return ExchangeAll(OpType::ALLTOALL_BASE, given, got, {output}, options.timeout);
}

ProcessGroup::WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  const auto size = static_cast<size_t>(getSize());
  if (outputs.size() != size || inputs.size() != size) {
    Throw(absl::StrCat("all_to_all takes ", size, " tensors and gives as many"));
  }
  for (const Tensors* tensors : {&outputs, &inputs}) {
    for (const at::Tensor& tensor : *tensors) CheckTensor(tensor, "all_to_all");
  }
  return ExchangeAll(OpType::ALLTOALL, inputs, outputs, outputs, options.timeout);
}

}  // namespace thalweg
