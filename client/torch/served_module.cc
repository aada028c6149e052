#include "client/torch/served_module.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>

#include "client/torch/served_bucket.h"
#include "client/torch/throw.h"

namespace py = pybind11;

namespace thalweg {
namespace {

Optimizer OptimizerNamed(const std::string& name) {
  if (name == "sgd") return Optimizer::kSgd;
  return name == "lamb" ? Optimizer::kLamb : Optimizer::kAdam;
}

std::unique_ptr<ServedBucket> MakeServedBucket(
    const std::shared_ptr<Session>& session, uint32_t number,
    const ServedBucket::Parameters& parameters, const std::vector<uint32_t>& groups,
    const std::string& optimizer, bool decoupled, bool nesterov, bool maximize, bool commits,
    const std::string& down, uint32_t ahead, bool alone, bool delay_aware, uint32_t quorum,
    std::optional<double> grace, bool drops_late) {
  UpdateRule update{.optimizer = OptimizerNamed(optimizer),
                    .decoupled = decoupled,
                    .nesterov = nesterov,
                    .maximize = maximize,
                    .commits = commits,
                    .groups = groups,
                    .ahead = ahead,
                    .alone = alone,
                    .delay_aware = delay_aware,
                    .quorum = quorum,
                    .grace_ms = grace ? static_cast<uint32_t>(*grace * 1000) : kMeasuredGrace,
                    .drops_late = drops_late};
  update.down = OrThrow(ParseWireFormat(down));
  const py::gil_scoped_release release;
  return std::make_unique<ServedBucket>(session, number, parameters, update);
}

std::shared_ptr<torch::jit::PythonFutureWrapper> Push(ServedBucket& bucket,
                                                      const at::Tensor& gradients,
                                                      uint64_t settings, double waited) {
  ServedBucket::Future future;
  {
    const py::gil_scoped_release release;
    future = bucket.Push(gradients, settings, waited);
  }
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

using AsksShards = ServedBucket::Future (ServedBucket::*)(uint64_t settings);

template <AsksShards kAsk>
std::shared_ptr<torch::jit::PythonFutureWrapper> Begin(ServedBucket& bucket, uint64_t settings) {
  ServedBucket::Future future;
  {
    const py::gil_scoped_release release;
    future = (bucket.*kAsk)(settings);
  }
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

}  // namespace

void SetSettings(Session& session, uint64_t number,
                 const std::vector<std::map<std::string, double>>& groups, double grad_scale,
                 double max_grad_norm, double grad_squares, bool measures, bool waits_for_all,
                 bool gives_nothing) {
  UpdateStep step{.groups = {},
                  .grad_scale = grad_scale,
                  .max_grad_norm = max_grad_norm,
                  .grad_squares = grad_squares,
                  .measures = measures,
                  .waits_for_all = waits_for_all,
                  .gives_nothing = gives_nothing};
  for (const auto& group : groups) step.groups.push_back(GroupStepOf(group));
  ThrowIfError(session.SetSettings(number, step));
}

void DefineServed(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  m.def("total_of_squares", &TotalOfSquares, py::arg("squares"));
  py::class_<ServedBucket>(m, "ServedBucket")
      .def(py::init(&MakeServedBucket), py::arg("session"), py::kw_only(), py::arg("number"),
           py::arg("named_parameters"), py::arg("groups"), py::arg("optimizer"),
           py::arg("decoupled"), py::arg("nesterov"), py::arg("maximize"), py::arg("commits"),
           py::arg("down"), py::arg("ahead"), py::arg("alone"), py::arg("delay_aware"),
           py::arg("quorum"), py::arg("grace"), py::arg("drops_late"))
      .def("push", &Push, py::arg("gradients"), py::arg("settings"), py::arg("waited"))
      .def("pull", &Begin<&ServedBucket::Pull>, py::arg("settings"))
      .def("measure", &Begin<&ServedBucket::Measure>, py::arg("settings"))
      .def("read", &ServedBucket::Read, released, py::arg("slice"))
      .def("write", &ServedBucket::Write, released, py::arg("slice"), py::arg("values"),
           py::arg("steps"));
}

}  // namespace thalweg
