#include "client/torch/optim_module.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "client/torch/fused_tensors.h"
#include "client/torch/unscaled_grads.h"

namespace py = pybind11;

namespace thalweg {
namespace {

void Set(double lr, double weight_decay, bool maximize, double max_grad_norm,
         OptimSettings* settings) {
  settings->lr = lr;
  settings->weight_decay = weight_decay;
  settings->maximize = maximize;
  settings->max_grad_norm = max_grad_norm;
}

void Set(std::pair<double, double> betas, double eps, bool decoupled, bool bias_correction,
         AdamSettings* settings) {
  settings->beta1 = betas.first;
  settings->beta2 = betas.second;
  settings->epsilon = eps;
  settings->decoupled = decoupled;
  settings->bias_correction = bias_correction;
}

void DefineSettings(py::module_& m) {
  py::class_<AdamSettings>(m, "AdamSettings")
      .def(py::init([](double lr, double weight_decay, bool maximize, double max_grad_norm,
                       std::pair<double, double> betas, double eps, bool decoupled,
                       bool bias_correction) {
             AdamSettings settings;
             Set(lr, weight_decay, maximize, max_grad_norm, &settings);
             settings.norm_epsilon = kTorchNormEpsilon;
             Set(betas, eps, decoupled, bias_correction, &settings);
             return settings;
           }),
           py::kw_only(), py::arg("lr"), py::arg("weight_decay"), py::arg("maximize"),
           py::arg("max_grad_norm"), py::arg("betas"), py::arg("eps"), py::arg("decoupled"),
           py::arg("bias_correction"));
  py::class_<SgdSettings>(m, "SgdSettings")
      .def(py::init([](double lr, double weight_decay, bool maximize, double max_grad_norm,
                       double momentum, double dampening, bool nesterov) {
             SgdSettings settings;
             Set(lr, weight_decay, maximize, max_grad_norm, &settings);
             settings.norm_epsilon = kTorchNormEpsilon;
             settings.momentum = momentum;
             settings.dampening = dampening;
             settings.nesterov = nesterov;
             return settings;
           }),
           py::kw_only(), py::arg("lr"), py::arg("weight_decay"), py::arg("maximize"),
           py::arg("max_grad_norm"), py::arg("momentum"), py::arg("dampening"),
           py::arg("nesterov"));
  py::class_<LambSettings>(m, "LambSettings")
      .def(py::init([](double lr, double weight_decay, bool maximize, double max_grad_norm,
                       std::pair<double, double> betas, double eps, bool decoupled,
                       bool bias_correction, bool grad_averaging, bool trust_ratio) {
             LambSettings settings;
             Set(lr, weight_decay, maximize, max_grad_norm, &settings);
             Set(betas, eps, decoupled, bias_correction, &settings);
             settings.grad_averaging = grad_averaging;
             settings.trust_ratio = trust_ratio;
             return settings;
           }),
           py::kw_only(), py::arg("lr"), py::arg("weight_decay"), py::arg("maximize"),
           py::arg("max_grad_norm"), py::arg("betas"), py::arg("eps"), py::arg("decoupled"),
           py::arg("bias_correction"), py::arg("grad_averaging"), py::arg("trust_ratio"));
}

}  // namespace

void DefineOptim(py::module_& m) {
  py::register_exception<NotFusable>(m, "NotFusable", PyExc_RuntimeError);
  m.def("check_fusable", &CheckFusable, py::arg("params"));
  DefineSettings(m);
  m.def("unscaled_grads", &UnscaledGrads, py::arg("grads"), py::arg("scale"), py::arg("memory"),
        py::call_guard<py::gil_scoped_release>());
  using NoLock = py::call_guard<py::gil_scoped_release>;
  py::class_<FusedTensors>(m, "FusedTensors")
      .def(py::init([](std::vector<at::Tensor> params, std::vector<std::vector<at::Tensor>> states,
                       std::vector<at::Tensor> steps,
                       std::vector<std::optional<at::Tensor>> copies) {
             return FusedTensors(
                 {std::move(params), std::move(states), std::move(steps), std::move(copies)});
           }),
           py::arg("params"), py::arg("states"), py::arg("steps"), py::arg("copies"))
      .def("check_grads", &FusedTensors::CheckGrads)
      .def("grad_squares", &FusedTensors::GradSquares, NoLock())
      .def("adam", &FusedTensors::Adam, NoLock(), py::arg("settings"), py::kw_only(),
           py::arg("grad_scale"), py::arg("grad_squares") = 0.0)
      .def("sgd", &FusedTensors::Sgd, NoLock(), py::arg("settings"), py::kw_only(),
           py::arg("grad_scale"), py::arg("grad_squares") = 0.0)
      .def("lamb", &FusedTensors::Lamb, NoLock(), py::arg("settings"), py::kw_only(),
           py::arg("grad_scale"), py::arg("grad_squares") = 0.0);
}

}  // namespace thalweg
