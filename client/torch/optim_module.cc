#include "client/torch/optim_module.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "client/torch/fused_tensors.h"

namespace py = pybind11;

namespace thalweg {
namespace {

size_t Adam(FusedTensors& tensors, double lr, double beta1, double beta2, double eps,
            double weight_decay, bool decoupled, bool bias_correction, double grad_factor) {
  return tensors.Adam({lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction},
                      grad_factor);
}

size_t Sgd(FusedTensors& tensors, double lr, double momentum, double dampening, double weight_decay,
           bool nesterov, const std::vector<bool>& fresh, double grad_factor) {
  return tensors.Sgd({lr, momentum, dampening, weight_decay, nesterov}, fresh, grad_factor);
}

size_t Lamb(FusedTensors& tensors, double lr, double beta1, double beta2, double eps,
            double weight_decay, bool decoupled, bool bias_correction, bool grad_averaging,
            bool trust_ratio, double grad_factor) {
  return tensors.Lamb({{lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction},
                       grad_averaging,
                       trust_ratio},
                      grad_factor);
}

}  // namespace

void DefineOptim(py::module_& m) {
  py::register_exception<NotFusable>(m, "NotFusable", PyExc_RuntimeError);
  m.def("check_fusable", &CheckFusable, py::arg("params"));
  using NoLock = py::call_guard<py::gil_scoped_release>;
  py::class_<FusedTensors>(m, "FusedTensors")
      .def(py::init<std::vector<at::Tensor>, std::vector<std::vector<at::Tensor>>,
                    std::vector<at::Tensor>, std::vector<std::optional<at::Tensor>>>(),
           py::arg("params"), py::arg("states"), py::arg("steps"), py::arg("copies"))
      .def("check_grads", &FusedTensors::CheckGrads)
      .def("grad_squares", &FusedTensors::GradSquares, NoLock())
      .def("adam", &Adam, NoLock(), py::kw_only(), py::arg("lr"), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"),
           py::arg("bias_correction"), py::arg("grad_factor"))
      .def("sgd", &Sgd, NoLock(), py::kw_only(), py::arg("lr"), py::arg("momentum"),
           py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"), py::arg("fresh"),
           py::arg("grad_factor"))
      .def("lamb", &Lamb, NoLock(), py::kw_only(), py::arg("lr"), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"),
           py::arg("bias_correction"), py::arg("grad_averaging"), py::arg("trust_ratio"),
           py::arg("grad_factor"));
}

}  // namespace thalweg
