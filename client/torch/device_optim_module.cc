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
      .def("grad_squares", &FusedDeviceTensors::GradSquares, NoLock());
  const auto def_step = [&tensors]<class Settings>(const char* name,
                                                   size_t (FusedDeviceTensors::*step)(
                                                       const Settings&, const DeviceInputs&)) {
    tensors.def(
        name,
        [step](FusedDeviceTensors& t, const Settings& settings, const Number& lr,
               const Number& grad_scale, const Number& found_inf, const Number& grad_squares) {
          return (t.*step)(settings, {lr, grad_scale, found_inf, grad_squares});
        },
        NoLock(), py::arg("settings"), py::kw_only(), py::arg("lr") = py::none(),
        py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(),
        py::arg("grad_squares") = py::none());
  };
  def_step("adam", &FusedDeviceTensors::Adam);
  def_step("sgd", &FusedDeviceTensors::Sgd);
  def_step("lamb", &FusedDeviceTensors::Lamb);
}

}  // namespace thalweg
