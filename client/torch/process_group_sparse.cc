// This file holds the part of ProcessGroup that adds up sparse tensors: every rank gets what all
// have, and adds it up in the order of ranks, in memory of the CPU.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/core/completions.h"
#include "client/torch/collective_tensors.h"
#include "client/torch/process_group.h"
#include "client/torch/tensor.h"

namespace thalweg {
namespace {

using Tensors = std::vector<at::Tensor>;

// Calls `use` when the work has ended well, and otherwise ends `whole` with its error, or with that
// of `use`.
void Follow(c10d::Work& work, const c10::intrusive_ptr<CollectiveWork>& whole,
            std::function<void()> use) {
  const Completions::InCallback here;
  work.getFuture()->addCallback([whole, use = std::move(use)](c10::ivalue::Future& future) {
    std::string error;
    if (future.hasError()) {
      error = future.tryRetrieveErrorMessage();
    } else {
      try {
        return use();
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    }
    whole->FinishOne(absl::AbortedError(absl::StripPrefix(error, "thalweg: ")));
  });
}

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
  const auto whole = MakeWork(c10d::OpType::ALLREDUCE, {tensor}, {tensor}, 1);
  const auto all = std::make_shared<Gathered>();
  const auto self = c10::intrusive_ptr<ProcessGroup>::reclaim_copy(this);
  const auto gather = [self, timeout = options.timeout](const at::Tensor& given, Tensors got) {
    TensorLists outputs{std::move(got)};
    Tensors inputs{given.contiguous()};
    c10d::AllgatherOptions of_all;
    of_all.timeout = timeout;
    return self->allgather(outputs, inputs, of_all);
  };
  const auto add_up = [whole, all, tensor, op, size = getSize()] {
    const c10::InferenceMode mode(tensor.is_inference());
    const at::NoGradGuard no_grad;
    const at::Tensor values = at::cat(all->values);
    at::Tensor sum = at::sparse_coo_tensor(at::cat(all->indices, 1), values, tensor.sizes());
    sum = sum.coalesce();
    if (op == c10d::ReduceOp::AVG) sum._values().div_(size);
    tensor.copy_(sum);
    if (!tensor.is_cpu()) {  // the work ends when the copy has, on this thread's stream
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
    }
    whole->FinishOne(absl::OkStatus());
  };
  const at::Tensor description = Describe(mine);
  for (int rank = 0; rank < getSize(); ++rank) {
    all->descriptions.push_back(at::empty_like(description));
  }
  Follow(*gather(description, all->descriptions), whole, [=] {
    Prepare(mine, *all);
    const auto indices = gather(mine._indices(), all->indices);
    const auto values = gather(mine._values(), all->values);
    Follow(*indices, whole, [=] { Follow(*values, whole, add_up); });
  });
  return whole;
}

}  // namespace thalweg
