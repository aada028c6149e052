// CollectiveWork is what a call of a process group returns.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "absl/status/status.h"

namespace thalweg {

// A CollectiveWork consists of one or more collectives and is complete when all of them are.
// Thread-safe. wait() throws the first error.
class CollectiveWork : public c10d::Work {
 public:
  // `inputs` are what a profiler shows, which sees the operation as "thalweg:all_reduce" and the
  // like from now on until it has ended; `outputs` are the tensors that hold the result. `count` ≥
  // 1 is how often FinishOne comes.
  CollectiveWork(int rank, c10d::OpType type, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs, size_t count, uint64_t sequence);

  // One of the collectives has ended. The last call runs `then`, if all were good, before anybody
  // sees the work complete, and then the future's callbacks.
  void FinishOne(const absl::Status& status);
  // Before that, of a receive: whose values came.
  void NoteSource(uint32_t rank) { source_ = static_cast<int>(rank); }
  void Then(std::function<void()> then) { then_ = std::move(then); }
  // Before anybody has the work: what wait() calls, without a lock, if it is going to wait. It does
  // not on an error, which it throws.
  void BeforeWait(std::function<absl::Status()> call) { before_wait_ = std::move(call); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  // Waits without Python's lock, if the caller has let go of it. 0 waits as long as the
  // collectives' own timeout allows.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override {}  // the session is what can be aborted
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  int sourceRank() const override { return source_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> then_;
  std::function<absl::Status()> before_wait_;
  std::atomic<int> source_{-1};
  size_t left_;  // guarded by mutex_, as is the next
  absl::Status first_error_;
};

}  // namespace thalweg
