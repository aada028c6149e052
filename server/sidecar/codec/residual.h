// A Residual is what one parameter's gradients have left out so far: values in memory of its own,
// or at a place that somebody else keeps (CodecMemory).
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace thalweg {

// Thread-compatible.
class Residual {
 public:
  Residual() = default;
  Residual(std::vector<float> values) : own_(std::move(values)) {}  // NOLINT: they are one
  Residual(Residual&&) = default;
  Residual& operator=(Residual&&) = default;

  size_t size() const { return Values().size(); }
  bool empty() const { return Values().empty(); }
  float* data() { return place_ == nullptr ? own_.data() : there_.data(); }
  const float* data() const { return Values().data(); }
  operator std::span<float>() { return {data(), size()}; }      // NOLINT: as a vector's
  operator std::span<const float>() const { return Values(); }  // NOLINT: as a vector's
  friend bool operator==(const Residual& a, const Residual& b) {
    return std::ranges::equal(a.Values(), b.Values());
  }

  // Adds zeros, or drops values, unless it has as many.
  void Resize(size_t elems) {
    if (elems == size()) return;
    Own();
    own_.resize(elems);
  }
  // From now on the values are those in `there`, which lies in `place`.
  void LieIn(std::span<float> there, std::shared_ptr<const void> place) {
    there_ = there;
    place_ = std::move(place);
    own_ = {};
  }
  // Takes the values to memory of its own: before they change, if their place must stay as it is.
  void Own() {
    if (place_ == nullptr) return;
    own_.assign(there_.begin(), there_.end());
    place_ = nullptr;
  }

 private:
  std::span<const float> Values() const {
    return place_ == nullptr ? std::span<const float>(own_) : there_;
  }

  std::vector<float> own_;  // while `place_` is null
  std::span<float> there_;
  std::shared_ptr<const void> place_;
};

}  // namespace thalweg
