#include "server/sidecar/bucket/round_report.h"

#include <spdlog/spdlog.h>

#include <cmath>

namespace thalweg {

RoundReport::RoundReport(const ipc::Hello& job, SidecarMetrics& metrics, TraceWriter* trace)
    : job_(job.job),
      world_size_(job.world_size),
      workers_(job.world_size),
      codec_(job.codec.ToString()),
      is_alone_(job.num_nodes == 1),
      metrics_(metrics),
      trace_(trace, "sidecar", job.job, {{"node", job.node}, {"num_nodes", job.num_nodes}}) {}

void RoundReport::CountTimes(const ipc::Complete& message, Duration total) const {
  const auto observe = [](Histogram& histogram, uint64_t ns) {
    histogram.Observe(static_cast<double>(ns) * 1e-9);
  };
  metrics_.buckets.Add();
  metrics_.nonfinite.Add(static_cast<double>(message.nonfinite_elems));
  if (message.nonfinite_elems > 0) metrics_.nonfinite_buckets.Add();
  metrics_.bucket_seconds.Observe(ToSeconds(total));
  observe(metrics_.wait, message.wait_ns);
  observe(metrics_.reduce, message.reduce_ns);
  if (is_alone_) return;
  observe(metrics_.wire, message.wire_ns);
  observe(metrics_.decode, message.decode_ns);
}

void RoundReport::NoteWorkers(uint32_t workers) {
  // A pull has results of no worker.
  if (workers == 0 || workers >= workers_.exchange(workers)) return;
  spdlog::warn(
      "job '{}': results are means over {} of its {} workers: it goes on without the others", job_,
      workers, world_size_);
}

void RoundReport::CountRound(NodeBucket& bucket) const {
  const UpdateRound kind = bucket.round().kind();
  const bool has_gradient = kind == UpdateRound::kPush;
  const bool commits = bucket.update() && bucket.update()->commits;
  const bool has_result = commits ? kind == UpdateRound::kPull : has_gradient;
  if (has_gradient && bucket.id().index == 0) metrics_.steps.Add();
  for (const BucketCodec* codec : bucket.round().codecs()) {
    const auto count = [&](const char* direction, bool is_whole, uint64_t wire_bytes) {
      const Labels labels = {{"codec", codec->name()}, {"direction", direction}};
      metrics_.registry
          .GetCounter("thalweg_sidecar_raw_bytes_total",
                      "Gradient bytes before encoding (sent) and after decoding (received)", labels)
          .Add(is_whole ? static_cast<double>(codec->tensors().Bytes()) : 0);
      metrics_.registry
          .GetCounter("thalweg_sidecar_wire_bytes_total", "Encoded gradient bytes exchanged",
                      labels)
          .Add(static_cast<double>(wire_bytes));
    };
    count("sent", has_gradient, codec->traffic.sent);
    count("received", has_result, codec->traffic.received);
  }
}

void RoundReport::CountWeightsWait(size_t quarter, Duration waited) const {
  metrics_.weights_wait.at(quarter - 1)->Add(ToSeconds(waited));
}

void RoundReport::CountExchange(Duration time) const {
  metrics_.exchange_seconds.Add(ToSeconds(time));
}

TraceSubject RoundReport::Describe(const NodeBucket& bucket) const {
  TraceSubject what;
  what.bucket = bucket.id();
  what.round = bucket.round().number();
  what.raw_bytes = bucket.layout().Elems() * SizeOf(bucket.layout().dtype);
  what.codec = codec_;
  return what;
}

TraceSubject RoundReport::Describe(const NodeBucket& bucket, const BucketCodec& codec) const {
  TraceSubject what;
  what.bucket = bucket.id();
  what.round = bucket.round().number();
  what.raw_bytes = codec.tensors().Bytes();
  what.codec = codec.name();
  return what;
}

TraceSubject RoundReport::Describe(const NodeBucket& bucket, const BucketCodec& codec,
                                   const Part& part, uint32_t chunk, uint64_t wire_bytes) const {
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

}  // namespace thalweg
