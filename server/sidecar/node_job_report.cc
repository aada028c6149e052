// What a NodeJob counts of its buckets, and what it says of them in the trace (docs/timeline.md).

#include <cmath>
#include <utility>

#include "server/sidecar/node_job.h"

namespace thalweg {

void NodeJob::CountTimes(const ::thalweg::Complete& message, Duration total) {
  SidecarMetrics& metrics = context_.metrics;
  const auto observe = [](Histogram& histogram, uint64_t ns) {
    histogram.Observe(static_cast<double>(ns) * 1e-9);
  };
  metrics.buckets.Add();
  if (message.id.index == 0) metrics.steps.Add();
  metrics.nonfinite.Add(static_cast<double>(message.nonfinite_elems));
  if (message.nonfinite_elems > 0) metrics.nonfinite_buckets.Add();
  metrics.bucket_seconds.Observe(ToSeconds(total));
  observe(metrics.wait, message.wait_ns);
  observe(metrics.reduce, message.reduce_ns);
  if (spec_.num_nodes == 1) return;
  observe(metrics.wire, message.wire_ns);
  observe(metrics.decode, message.decode_ns);
}

// Nothing is in flight: nobody else touches the bucket before its workers are told.
void NodeJob::CountTraffic(NodeBucket& bucket) {
  MetricRegistry& registry = context_.metrics.registry;
  for (const BucketCodec* codec : bucket.CodecsInUse()) {
    const auto count = [&](const char* direction, uint64_t wire_bytes) {
      const Labels labels = {{"codec", codec->name()}, {"direction", direction}};
      registry
          .GetCounter("thalweg_sidecar_raw_bytes_total",
                      "Gradient bytes before encoding (sent) and after decoding (received)", labels)
          .Add(static_cast<double>(codec->tensors().Bytes()));
      registry
          .GetCounter("thalweg_sidecar_wire_bytes_total", "Encoded gradient bytes exchanged",
                      labels)
          .Add(static_cast<double>(wire_bytes));
    };
    count("sent", codec->traffic.sent);
    count("received", codec->traffic.received);
  }
}

TraceSubject NodeJob::Describe(const NodeBucket& bucket) const {
  TraceSubject what;
  what.bucket = bucket.id;
  what.round = bucket.round;
  what.raw_bytes = bucket.layout.Elems() * SizeOf(bucket.layout.dtype);
  what.codec = spec_.codec.ToString();
  return what;
}

TraceSubject NodeJob::Describe(const NodeBucket& bucket, const BucketCodec& codec) const {
  TraceSubject what;
  what.bucket = bucket.id;
  what.round = bucket.round;
  what.raw_bytes = codec.tensors().Bytes();
  what.codec = codec.name();
  return what;
}

TraceSubject NodeJob::Describe(const NodeBucket& bucket, const BucketCodec& codec, const Part& part,
                               uint32_t chunk, uint64_t wire_bytes) const {
  TraceSubject what = Describe(bucket, codec);
  what.bucket = part.bucket.id;
  const uint32_t shard = part.shard_of_chunk.empty() ? 0 : part.shard_of_chunk[chunk];
  what.chunk = {chunk, part.round, shard};
  // The chunk's share of what the part stands for.
  const double share =
      static_cast<double>(part.plan.Elems(chunk)) / static_cast<double>(part.Elems());
  what.raw_bytes =
      static_cast<uint64_t>(std::llround(static_cast<double>(part.bucket.raw_bytes) * share));
  what.wire_bytes = wire_bytes;
  return what;
}

void NodeJob::TraceRound(const TraceSubject& what, TimePoint first_submit, TimePoint ready_since,
                         TimePoint complete) const {
  trace_.Wait("wait_workers", first_submit, ready_since, what);
  trace_.Wait("exchange", ready_since, complete, what);
  trace_.Work("return", complete, Now(), what);
}

void NodeJob::TraceResult(const TraceSubject& what, TimePoint sent, TimePoint begin,
                          TimePoint end) const {
  trace_.Wait("wire", sent, begin, what);
  trace_.Work("decode", begin, end, what);
}

}  // namespace thalweg
