// This is the extension module thalweg_emulated_optim: FusedDeviceTensors for tensors on the CPU.
#include <pybind11/pybind11.h>

#include <exception>

#include "client/torch/optim_module.h"
#include "client/torch/tensor_group.h"

namespace py = pybind11;

PYBIND11_MODULE(thalweg_emulated_optim, m) {
  py::module_::import("thalweg._C");  // it defines the settings and the exception
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const thalweg::NotFusable& refusal) {
      py::set_error(py::module_::import("thalweg._C").attr("NotFusable"), refusal.what());
    }
  });
  thalweg::DefineDeviceOptim(m);
}
