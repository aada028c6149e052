#include "server/sidecar/bucket/round_runner.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/sidecar/bucket/shard_residuals.h"

namespace thalweg {
namespace {

Payload CopyOf(std::span<const std::byte> bytes) {
  std::shared_ptr<std::byte[]> copy = std::make_shared_for_overwrite<std::byte[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.get());
  return Payload({copy.get(), bytes.size()}, copy);
}

}  // namespace

RoundRunner::RoundRunner(const RoundTerms& terms, const Context& context, InputTerms inputs,
                         Listener& listener)
    : terms_(terms),
      context_(context),
      inputs_(std::move(inputs)),
      listener_(listener),
      turns_(context.outcome),
      steps_(context.outcome),
      pool_(terms.threads),
      finish_pool_(terms.has_steps ? terms.threads : 1) {}

void RoundRunner::WaitUntilIdle(TimePoint deadline) {
  turns_.WaitUntilIdle(deadline);
  steps_.WaitUntilIdle(deadline);
}

void RoundRunner::Wake() {
  turns_.Wake();
  steps_.Wake();
}

absl::Status RoundRunner::Submit(uint32_t local_rank, const ipc::Submit& message) {
  const std::shared_ptr<NodeBucket> bucket = context_.buckets.Find(message.id.index);
  if (bucket == nullptr || bucket->id() != message.id) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", ToString(message.id), " was submitted but never announced"));
  }
  // The first round registers the bucket, which waits for the shards.
  const bool may_run_at_once = bucket->compressing().empty() &&
                               bucket->whole().part().plan.Count() == 1 && message.round > 1;
  if (local_rank == 0 && message.waited_ns > 0) {
    context_.report.CountWeightsWait(context_.buckets.QuarterOf(message.id.index),
                                     std::chrono::nanoseconds(message.waited_ns));
  }
  const TimePoint now = Now();
  THALWEG_ASSIGN_OR_RETURN(const TurnQueue::Turn turn,
                           turns_.Submit(bucket, local_rank, message, now, may_run_at_once));
  context_.progress.Note(now);
  if (turn == TurnQueue::Turn::kYours) RunAtOnce(bucket);
  return absl::OkStatus();
}

absl::Status RoundRunner::OnWorkerLeft(uint32_t local_rank, const std::string& name) {
  turns_.NoteLeft(name);
  for (const auto& bucket : context_.buckets.All()) {
    const BucketRound::Waiting waiting = bucket->round().waiting();
    const auto& missing = waiting.missing;
    if (std::find(missing.begin(), missing.end(), local_rank) == missing.end()) continue;
    return absl::AbortedError(absl::StrCat(name, " left while round ", waiting.round + 1,
                                           " of bucket ", ToString(bucket->id()),
                                           " waited for it"));
  }
  return absl::OkStatus();
}

void RoundRunner::RunLoop() {
  absl::Status status;
  while (status.ok()) {
    const std::shared_ptr<NodeBucket> bucket = turns_.Next();
    if (bucket == nullptr) return;
    status = Begin(*bucket);
    if (status.ok()) status = Exchange(bucket);
    turns_.EndTurn();
  }
  listener_.OnFailed(status);
}

void RoundRunner::RunAtOnce(const std::shared_ptr<NodeBucket>& bucket) {
  absl::Status status = Begin(*bucket);
  bool can_run = true;
  for (uint32_t worker = 0; status.ok() && worker < inputs_.local_size; ++worker) {
    can_run = can_run && (!bucket->round().has_gradient() ||
                          bucket->memory().WaitInput(worker, 1, Now()) >= 1);
  }
  if (status.ok() && can_run) {
    status = Exchange(bucket);
  } else if (status.ok()) {
    turns_.PutBack(bucket);
  }
  turns_.EndTurn();
  if (!status.ok()) listener_.OnFailed(status);
}

absl::Status RoundRunner::Begin(NodeBucket& bucket) {
  if (bucket.round().is_running()) return absl::OkStatus();
  if (!bucket.compressing().empty()) context_.states.AwaitUse();
  bucket.BeginRound(loss_scale_);
  if (bucket.round().number() == 2) context_.buckets.TakeReplaced(bucket.id().index);  // freed here
  return bucket.memory().BeginRound();
}

absl::Status RoundRunner::Exchange(const std::shared_ptr<NodeBucket>& bucket) {
  ArenaGradient gradient(*bucket, inputs_);
  if (!bucket->round().has_gradient()) return Pull(bucket);
  for (BucketCodec* const codec : bucket->round().codecs()) {
    const TimePoint start = Now();
    THALWEG_RETURN_IF_ERROR(codec->FollowLossScale(bucket->round().loss_scale()));
    THALWEG_RETURN_IF_ERROR(codec->WithholdResiduals(bucket->round().unused()));
    THALWEG_ASSIGN_OR_RETURN(Part* const part, codec->Begin(pool_, gradient));
    const TimePoint end = Now();
    bucket->round().AddReduceTime(end - start);
    // A bucket that is taken whole has nothing to prepare.
    if (context_.report.trace() && codec != &bucket->whole()) {
      context_.report.trace().Work("compress", start, end,
                                   context_.report.Describe(*bucket, *codec));
    }
    const Step step{bucket, codec, part};
    bucket->round().BeginPart(*part);
    if (!codec->EndsWith(*part)) steps_.AddFirst(step);
    THALWEG_RETURN_IF_ERROR(SendPart(step, pool_));
    if (part->plan.Count() == 0) FinishCodec(step);
  }
  return absl::OkStatus();
}

absl::Status RoundRunner::Pull(const std::shared_ptr<NodeBucket>& bucket) {
  BucketCodec& codec = bucket->updating();
  Part& part = bucket->updated_part();
  bucket->round().BeginPart(part);
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    Contribution contribution;
    contribution.id = {part.bucket.id, chunk, part.round};
    contribution.wire = part.bucket.wire;
    contribution.elems = part.plan.Elems(chunk);
    contribution.collective = kPull;
    contribution.settings = bucket->round().settings();
    bucket->round().NoteSent(codec, part, chunk, 0, Duration::zero(), Now());
    THALWEG_RETURN_IF_ERROR(
        context_.shards.Contribute(part.shard_of_chunk[chunk], std::move(contribution)));
  }
  if (part.plan.Count() == 0) FinishCodec({bucket, &codec, &part});
  return absl::OkStatus();
}

absl::Status RoundRunner::SendPart(const Step& step, FoldPool& pool) {
  THALWEG_RETURN_IF_ERROR(Announce(step));
  const bool is_reduced_here = terms_.num_nodes == 1 && !step.bucket->update();
  InOrder order;
  return pool.Run(step.part->plan.Count(), [&](uint32_t chunk) {
    return is_reduced_here ? ReduceChunk(step, chunk) : SendChunk(step, chunk, order);
  });
}

absl::Status RoundRunner::Announce(const Step& step) {
  Part& part = *step.part;
  if (part.round == 1 && !part.bucket.update) {
    THALWEG_ASSIGN_OR_RETURN(
        Placement::Placed placed,
        context_.shards.RegisterBucket(part.bucket, part.plan, Now() + terms_.timeout.shard()));
    part.shard_of_chunk = placed.shards;
    if (CodecMemory* const memory = step.bucket->codec_memory(); memory != nullptr) {
      memory->KeepPlace(part, placed.shards, placed.loads);
    }
    const BucketId& id = part.bucket.id;
    if (id.part == 0) listener_.OnPlaced({id, std::move(placed.shards), std::move(placed.loads)});
  }
  if (terms_.node != 0) return absl::OkStatus();
  return WriteShardResiduals(context_.shards, *step.codec, part, terms_.timeout.shard());
}

absl::Status RoundRunner::SendChunk(const Step& step, uint32_t chunk, InOrder& order) {
  const auto& [bucket, codec, part] = step;
  ArenaGradient gradient(*bucket, inputs_);
  const TimePoint start = Now();
  THALWEG_ASSIGN_OR_RETURN(const std::span<const std::byte> share,
                           codec->Encode(*part, chunk, gradient));
  Contribution contribution;
  contribution.id = {part->bucket.id, chunk, part->round};
  contribution.wire = part->bucket.wire;
  contribution.elems = part->plan.Elems(chunk);
  const uint32_t shard = part->shard_of_chunk[chunk];
  const std::optional<UpdateRule>& update = part->bucket.update;
  // The share lies there until the next round, which may begin while the shard of this process
  // still refers to it.
  const bool outlasts_round = shard == terms_.own_shard && update && update->answers_early();
  contribution.payload = outlasts_round ? CopyOf(share) : Payload(share, bucket);
  contribution.settings = bucket->round().settings();
  if (HasResidual(contribution.wire)) contribution.loss_scale = bucket->round().loss_scale();
  const TimePoint encoded = Now();
  bucket->round().NoteSent(*codec, *part, chunk, share.size(), encoded - start - gradient.waited(),
                           encoded);
  if (shard != terms_.own_shard) bucket->round().CountOnLink(share.size());
  // Its result may be here, and the round over, before Contribute returns.
  std::optional<TraceSubject> what;
  if (context_.report.trace()) {
    what = context_.report.Describe(*bucket, *codec, *part, chunk, share.size());
    context_.report.trace().Work("reduce", start, encoded, *what);
  }
  return order.Do(chunk, [this, shard, contribution = std::move(contribution),
                          what = std::move(what)]() mutable {
    const TimePoint begin = Now();
    const absl::Status sent = context_.shards.Contribute(shard, std::move(contribution));
    if (what) context_.report.trace().Work("send", begin, Now(), *std::move(what));
    return sent;
  });
}

absl::Status RoundRunner::ReduceChunk(const Step& step, uint32_t chunk) {
  const auto& [bucket, codec, part] = step;
  ArenaGradient gradient(*bucket, inputs_);
  const TimePoint start = Now();
  RoundResult result;
  result.id = {bucket->id(), chunk, part->round};
  result.workers = terms_.world_size;
  // Nothing is compressed between the workers of one node.
  THALWEG_ASSIGN_OR_RETURN(result.nonfinite_elems, bucket->whole().Reduce(chunk, gradient));
  const TimePoint end = Now();
  context_.progress.Note(end);
  bucket->round().AddReduceTime(end - start - gradient.waited());
  if (context_.report.trace()) {
    context_.report.trace().Work("reduce", start, end,
                                 context_.report.Describe(*bucket, *codec, *part, chunk, 0));
  }
  if (bucket->round().FinishChunk(*codec, *part, result, Duration::zero())) FinishCodec(step);
  return absl::OkStatus();
}

void RoundRunner::OnResult(uint32_t shard, const RoundResult& received) {
  if (!context_.outcome.Check().ok()) return;
  Step step;
  TimePoint sent;
  const TimePoint start = Now();
  if (const absl::Status status = Decode(received, step, sent); !status.ok()) {
    if (step.bucket != nullptr) {  // the shard is not to blame for what a device has met
      if (const absl::Status device = step.bucket->memory().Check(); !device.ok()) {
        return listener_.OnFailed(device);
      }
    }
    return listener_.OnFailed(absl::Status(
        status.code(), absl::StrCat("aggregator shard ", shard, ": ", status.message())));
  }
  const TimePoint end = Now();
  context_.progress.Note(end);
  if (const JobTrace& trace = context_.report.trace()) {
    const TraceSubject what = context_.report.Describe(
        *step.bucket, *step.codec, *step.part, received.id.chunk, received.payload.SizeBytes());
    trace.Wait("wire", sent, start, what);
    trace.Work("decode", start, end, what);
  }
  if (const absl::Status status = context_.shards.OnAnswered(shard, 0, received.id.bucket.part);
      !status.ok()) {
    return listener_.OnFailed(status);
  }
  if (shard == terms_.own_shard) {
    step.bucket->round().CountOnLink(received.payload.SizeBytes() * (terms_.num_nodes - 1));
  }
  if (step.bucket->round().FinishChunk(*step.codec, *step.part, received, end - start)) {
    if (step.codec->EndsWith(*step.part)) {
      FinishCodec(step);
    } else {
      steps_.NoteHere(*step.part);
    }
  }
}

absl::Status RoundRunner::Decode(const RoundResult& received, Step& step, TimePoint& sent) {
  const BucketId& id = received.id.bucket;
  step.bucket = context_.buckets.Find(id.index);
  if (step.bucket != nullptr) {
    const auto [codec, part] = step.bucket->FindPart(id.part);
    step.codec = codec;
    step.part = part;
  }
  if (step.part == nullptr || step.part->bucket.id != id) {
    return absl::InvalidArgumentError(absl::StrCat("result for unknown bucket ", ToString(id)));
  }
  THALWEG_ASSIGN_OR_RETURN(sent, step.bucket->round().Claim(*step.part, received));
  if (step.part->gives_squares()) return step.bucket->round().TakeSquares(*step.part, received);
  CodecMemory* const memory = step.bucket->codec_memory();
  if (memory != nullptr) memory->KeepResult(*step.part, received);
  return step.codec->Decode(*step.part, received);
}

void RoundRunner::FinishLoop() {
  absl::Status status;
  while (status.ok()) {
    const std::optional<Step> step = steps_.Next();
    if (!step) return;
    status = TakeStep(*step);
    steps_.NoteDone();
  }
  listener_.OnFailed(status);
}

absl::Status RoundRunner::TakeStep(const Step& step) {
  NodeBucket& bucket = *step.bucket;
  ArenaGradient gradient(bucket, inputs_);
  const TimePoint start = Now();
  THALWEG_ASSIGN_OR_RETURN(Part* const next, step.codec->Next(finish_pool_, gradient));
  const TimePoint end = Now();
  bucket.round().AddReduceTime(end - start);
  if (context_.report.trace()) {
    context_.report.trace().Work("compress", start, end,
                                 context_.report.Describe(bucket, *step.codec));
  }
  if (next == nullptr) {
    FinishCodec(step);
    return absl::OkStatus();
  }
  const Step sending{step.bucket, step.codec, next};
  bucket.round().BeginPart(*next);
  steps_.AddLater(sending, step.codec->MayFollow(*next));
  return SendPart(sending, finish_pool_);
}

void RoundRunner::FinishCodec(const Step& step) {
  if (const absl::Status status = step.codec->ReturnResiduals(); !status.ok()) {
    return listener_.OnFailed(status);
  }
  if (!step.bucket->round().FinishCodec(*step.part)) return;
  if (step.codec != &step.bucket->whole()) context_.compression.Count(*step.bucket);
  Complete(*step.bucket);
}

void RoundRunner::Complete(NodeBucket& bucket) {
  const TimePoint start = Now();
  if (const absl::Status status = bucket.memory().EndRound(); !status.ok()) {
    return listener_.OnFailed(status);
  }
  context_.report.CountRound(bucket);
  FinishedRound round = bucket.FinishRound(Now());
  context_.report.CountExchange(turns_.EndRound(round.end));
  context_.compression.Describe(round.message);
  context_.report.CountTimes(round.message, round.end - round.ready_since);
  const JobTrace& trace = context_.report.trace();
  // The trace describes the round before the workers know: then the next round may begin.
  const TraceSubject what = trace ? context_.report.Describe(bucket) : TraceSubject();
  listener_.OnComplete(round.message);
  if (!trace) return;
  trace.Wait("wait_workers", round.first_submit, round.ready_since, what);
  trace.Wait("exchange", round.ready_since, start, what);
  trace.Work("return", start, Now(), what);
}

}  // namespace thalweg
