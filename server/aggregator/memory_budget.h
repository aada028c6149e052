// MemoryBudget shares a shard's memory out to its jobs, before they take it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "core/base/mutex.h"
#include "server/base/metrics.h"

namespace thalweg {

// A MemoryBudget is thread-safe. It counts what has been promised and measures nothing.
class MemoryBudget {
 public:
  // A Reservation is a part of the budget; it returns it when it is destroyed. Thread-compatible.
  class Reservation {
   public:
    // `budget` must outlive the reservation, which is empty at first.
    explicit Reservation(MemoryBudget& budget) : budget_(budget) {}
    ~Reservation() { Release(); }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    // Grows or shrinks to `bytes`. Returns ResourceExhausted when the budget has less than that for
    // this reservation: nothing has changed then, and the message says the number needed, the
    // number free (with what the reservation has already) and the limit.
    absl::Status Resize(uint64_t bytes);
    void Release();
    uint64_t bytes() const { return bytes_; }

   private:
    MemoryBudget& budget_;
    uint64_t bytes_ = 0;
  };

  // `reserved` shows the bytes that are reserved. `name` names the limit in errors. What is
  // reserved here is reserved from `whole` too, if there is one. Both must outlive the budget.
  MemoryBudget(uint64_t limit, Gauge& reserved, std::string name = "the limit",
               MemoryBudget* whole = nullptr)
      : gauge_(reserved), name_(std::move(name)), whole_(whole), limit_(limit) {}

  uint64_t limit() const;
  uint64_t reserved() const;
  // A limit below what is reserved lets reservations shrink only.
  void SetLimit(uint64_t limit);

 private:
  // Makes a reservation of `before` bytes one of `after` bytes.
  absl::Status Move(uint64_t before, uint64_t after);
  absl::Status MoveHere(uint64_t before, uint64_t after);

  Gauge& gauge_;
  const std::string name_;
  MemoryBudget* const whole_;

  mutable Mutex mutex_;
  uint64_t limit_ ABSL_GUARDED_BY(mutex_);
  uint64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace thalweg
