// This header formats metrics for Prometheus.
#pragma once

#include <string>

#include "server/base/metrics.h"

namespace thalweg {

inline constexpr char kPrometheusType[] = "text/plain; version=0.0.4; charset=utf-8";

// Returns all metrics of `registry` in Prometheus' text format.
std::string PrometheusText(const MetricRegistry& registry);

}  // namespace thalweg
