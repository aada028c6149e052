#include "server/http/prometheus_text.h"

#include <limits>
#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace thalweg {
namespace {

// Each bucket of Prometheus includes the counts of all lower ones.
prometheus::ClientMetric::Histogram ToPrometheus(const MetricRegistry::Sample& sample) {
  prometheus::ClientMetric::Histogram out;
  out.sample_sum = sample.value;
  for (size_t i = 0; i < sample.counts.size(); ++i) {
    out.sample_count += sample.counts[i];
    const double bound =
        i < Histogram::kBounds ? Histogram::Bound(i) : std::numeric_limits<double>::infinity();
    out.bucket.push_back({out.sample_count, bound});
  }
  return out;
}

prometheus::MetricFamily ToPrometheus(const MetricRegistry::Family& family) {
  prometheus::MetricFamily out;
  out.name = family.name;
  out.help = family.help;
  for (const MetricRegistry::Sample& sample : family.samples) {
    prometheus::ClientMetric& metric = out.metric.emplace_back();
    for (const auto& [name, value] : sample.labels) metric.label.push_back({name, value});
    switch (family.kind) {
      case MetricRegistry::Kind::kCounter:
        out.type = prometheus::MetricType::Counter;
        metric.counter.value = sample.value;
        break;
      case MetricRegistry::Kind::kGauge:
        out.type = prometheus::MetricType::Gauge;
        metric.gauge.value = sample.value;
        break;
      case MetricRegistry::Kind::kHistogram:
        out.type = prometheus::MetricType::Histogram;
        metric.histogram = ToPrometheus(sample);
        break;
    }
  }
  return out;
}

}  // namespace

std::string PrometheusText(const MetricRegistry& registry) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& family : registry.Snapshot()) families.push_back(ToPrometheus(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace thalweg
