// This file holds the part of ProcessGroup that adds up sparse tensors: every rank gets what all
// have, and adds it up in the order of ranks, in memory of the CPU.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/core/completions.h"
#include "client/torch/collective_tensors.h"
#include "client/torch/process_group.h"
#include "client/torch/tensor.h"

namespace thalweg {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a rank tells the others of its tensor: its shape, its type, the number of sparse dimensions
// and that of values.
at::Tensor Describe(const at::Tensor& tensor) {
  std::vector<int64_t> numbers = tensor.sizes().vec();
  numbers.push_back(static_cast<int64_t>(tensor.scalar_type()));
  numbers.push_back(tensor.sparse_dim());
  numbers.push_back(tensor._nnz());
  return at::tensor(numbers, at::kLong);
}

// What all ranks have, by rank.
struct Gathered {
  Tensors descriptions;
  Tensors indices;
  Tensors values;
};

void Prepare(const at::Tensor& mine, Gathered& all) {
  const at::Tensor shape = Describe(mine).slice(0, 0, -1);
  for (size_t rank = 0; rank < all.descriptions.size(); ++rank) {
    const at::Tensor& theirs = all.descriptions[rank];
    if (!at::equal(theirs.slice(0, 0, -1), shape)) {
      const at::IntArrayRef numbers(theirs.const_data_ptr<int64_t>(), theirs.numel() - 3);
      Throw(absl::StrCat("allreduce of sparse tensors: rank ", rank, " of the group has shape ",
                         c10::str(numbers), ", this one ", c10::str(mine.sizes()),
                         ", or another type, or other sparse dimensions"));
    }
    const int64_t count = theirs[-1].item<int64_t>();
    std::vector<int64_t> sizes = mine._values().sizes().vec();
    sizes[0] = count;
    all.indices.push_back(at::empty({mine.sparse_dim(), count}, mine._indices().options()));
    all.values.push_back(at::empty(sizes, mine._values().options()));
  }
}

}  // namespace

ProcessGroup::WorkPtr ProcessGroup::AllReduceSparse(const at::Tensor& tensor,
                                                    const c10d::AllreduceOptions& options) {
  const c10d::ReduceOp::RedOpType op = options.reduceOp;
  if (op != c10d::ReduceOp::SUM && op != c10d::ReduceOp::AVG) {
    Throw(absl::StrCat("allreduce of sparse tensors with ", NameOf(op),
                       " is not supported: expected SUM or AVG"));
  }
  if (op == c10d::ReduceOp::AVG &&
      c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    Throw("allreduce of sparse tensors: integers have no exact mean; take the sum and divide");
  }
  // The caller may change the tensor as soon as this returns.
  const at::Tensor mine = (tensor.is_coalesced() ? tensor.clone() : tensor.coalesce()).cpu();
  const at::Tensor description = Describe(mine);
  const auto all = std::make_shared<Gathered>();
  for (int rank = 0; rank < getSize(); ++rank) {
    all->descriptions.push_back(at::empty_like(description));
  }
  const auto self = c10::intrusive_ptr<ProcessGroup>::reclaim_copy(this);
  const auto gather = [self, timeout = options.timeout](const at::Tensor& given,
                                                        const Tensors& got) {
    return self->Begin(c10d::OpType::ALLGATHER, {self->GatherPart(given.contiguous(), got)}, got,
                       timeout);
  };
  const auto add_up = [all, tensor, mine, op, gather] {
    Prepare(mine, *all);
    const WorkPtr indices = gather(mine._indices(), all->indices);
    gather(mine._values(), all->values)->wait();
    indices->wait();
    const c10::InferenceMode mode(tensor.is_inference());
    const at::NoGradGuard no_grad;
    at::Tensor sum =
        at::sparse_coo_tensor(at::cat(all->indices, 1), at::cat(all->values), tensor.sizes());
    sum = sum.coalesce();
    if (op == c10d::ReduceOp::AVG) sum._values().div_(static_cast<int64_t>(all->values.size()));
    tensor.copy_(sum);
    if (!tensor.is_cpu()) {  // the work ends when the copy has, on this thread's stream
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
    }
  };
  WorkPtr sum;
  {
    const Completions::Hidden here;
    sum = Begin(c10d::OpType::ALLGATHER, {GatherPart(description, all->descriptions)},
                all->descriptions, options.timeout, add_up);
  }
  // This one has a place in the order in which works end, and so do its callbacks.
  return Begin(c10d::OpType::ALLREDUCE, {Part{}}, {tensor}, options.timeout,
               [sum] { sum->wait(); });
}

}  // namespace thalweg
