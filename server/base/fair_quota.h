// FairQuota shares out what may exist only so many times, so that nobody can take everything.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace thalweg {

// Each taker may have as many places as it leaves free: one can take half of them, two a third
// each, and so on. Takers are told apart by where they are; the one without a name is ourselves,
// who may take what is free. Thread-compatible.
class FairQuota {
 public:
  explicit FairQuota(uint64_t count) : count_(count) {}

  uint64_t count() const { return count_; }
  uint64_t taken() const { return taken_; }
  uint64_t taken_by(const std::string& who) const {
    const auto found = by_.find(who);
    return found == by_.end() ? 0 : found->second;
  }

  // Returns whether `who` may take so many more.
  bool MayTake(const std::string& who, uint64_t places) const {
    if (places > count_ - taken_) return false;
    const uint64_t left = count_ - taken_ - places;
    return who.empty() || taken_by(who) + places <= left;
  }
  // Requires MayTake.
  void Take(const std::string& who, uint64_t places) {
    by_[who] += places;
    taken_ += places;
  }
  // Returns places that `who` has taken.
  void Return(const std::string& who, uint64_t places) {
    const auto found = by_.find(who);
    found->second -= places;
    taken_ -= places;
    if (found->second == 0) by_.erase(found);
  }

 private:
  const uint64_t count_;
  uint64_t taken_ = 0;
  std::map<std::string, uint64_t> by_;
};

}  // namespace thalweg
