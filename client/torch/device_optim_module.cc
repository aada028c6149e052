#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "client/torch/fused_device_tensors.h"
#include "client/torch/optim_module.h"

namespace py = pybind11;

namespace thalweg {
namespace {

using Number = std::optional<at::Tensor>;

}  // namespace

void DefineDeviceOptim(py::module_& m) {
  using NoLock = py::call_guard<py::gil_scoped_release>;
  py::class_<FusedDeviceTensors> tensors(m, "FusedDeviceTensors", py::module_local());
  tensors
      .def(py::init([](std::vector<at::Tensor> params, std::vector<std::vector<at::Tensor>> states,
                       std::vector<at::Tensor> steps, std::vector<Number> copies) {
             return FusedDeviceTensors(
                 {std::move(params), std::move(states), std::move(steps), std::move(copies)});
           }),
           py::arg("params"), py::arg("states"), py::arg("steps"), py::arg("copies"))
      .def("check_grads", &FusedDeviceTensors::CheckGrads)
      .def("use_grads_of_copies", &FusedDeviceTensors::UseGradsOfCopies, py::arg("exponent"))
      .def("grad_squares", &FusedDeviceTensors::GradSquares, NoLock());
  // `more`: what a step takes besides.
  const auto def_step = [&tensors](const char* name, auto step, const auto&... more) {
    tensors.def(name, step, NoLock(), py::arg("settings"), py::kw_only(),
                py::arg("lr") = py::none(), py::arg("grad_scale") = py::none(),
                py::arg("found_inf") = py::none(), more...);
  };
  def_step("adam", [](FusedDeviceTensors& t, const AdamSettings& settings, const Number& lr,
                      const Number& grad_scale, const Number& found_inf) {
    return t.Adam(settings, {lr, grad_scale, found_inf});
  });
  def_step("sgd", [](FusedDeviceTensors& t, const SgdSettings& settings, const Number& lr,
                     const Number& grad_scale, const Number& found_inf) {
    return t.Sgd(settings, {lr, grad_scale, found_inf});
  });
  def_step(
      "lamb",
      [](FusedDeviceTensors& t, const LambSettings& settings, const Number& lr,
         const Number& grad_scale, const Number& found_inf, const Number& grad_squares) {
        return t.Lamb(settings, {lr, grad_scale, found_inf}, grad_squares);
      },
      py::arg("grad_squares") = py::none());
}

}  // namespace thalweg
