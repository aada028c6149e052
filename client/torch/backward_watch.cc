#include "client/torch/backward_watch.h"

#include <ATen/ATen.h>

#include <atomic>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace thalweg {

struct BackwardWatch::State {
  ~State() {
    if (!told || Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire lock;
    told = py::object();
  }

  std::atomic<bool> is_armed = false;
  py::object told;  // with Python's lock
};

BackwardWatch::BackwardWatch() : state_(std::make_shared<State>()) {}

void BackwardWatch::Add(const at::Tensor& param) {
  param.register_hook([state = state_](const at::Tensor&) {
    if (!state->is_armed.load(std::memory_order_acquire)) return;
    const py::gil_scoped_acquire lock;
    if (!state->is_armed.exchange(false)) return;
    const py::object told = std::exchange(state->told, py::object());
    try {
      told();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

void BackwardWatch::Arm(py::function told) {
  state_->told = std::move(told);
  state_->is_armed.store(true, std::memory_order_release);
}

void BackwardWatch::Disarm() {
  state_->is_armed.store(false);
  state_->told = py::object();
}

}  // namespace thalweg
