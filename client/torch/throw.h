// Errors of thalweg._C: the exception of Python that a status becomes.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace thalweg {

inline PyObject* ExceptionFor(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
      return PyExc_ValueError;
    case absl::StatusCode::kDeadlineExceeded:
      return PyExc_TimeoutError;
    case absl::StatusCode::kUnavailable:
      return PyExc_ConnectionError;
    default:
      return PyExc_RuntimeError;
  }
}

inline void ThrowIfError(const absl::Status& status) {
  if (status.ok()) return;
  PyErr_SetString(ExceptionFor(status.code()), absl::StrCat("thalweg: ", status.message()).c_str());
  throw pybind11::error_already_set();
}

template <typename T>
T OrThrow(absl::StatusOr<T> result) {
  ThrowIfError(result.status());
  return *std::move(result);
}

}  // namespace thalweg
