// This macro returns early on a non-OK absl::Status. (Debian's Abseil has no status_macros.h.)
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define THALWEG_RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                          \
    if (::absl::Status thalweg_status_ = (expr); !thalweg_status_.ok()) return thalweg_status_; \
  } while (false)

#define THALWEG_CONCAT_INNER_(a, b) a##b
#define THALWEG_CONCAT_(a, b) THALWEG_CONCAT_INNER_(a, b)

// Evaluates `expr` (an absl::StatusOr<T>). On an error it returns the status from the enclosing
// function; otherwise it moves the value into `lhs`, which may be a declaration.
#define THALWEG_ASSIGN_OR_RETURN(lhs, expr) \
  THALWEG_ASSIGN_OR_RETURN_IMPL_(THALWEG_CONCAT_(thalweg_or_, __LINE__), lhs, expr)

#define THALWEG_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return std::move(tmp).status();       \
  lhs = *std::move(tmp)
