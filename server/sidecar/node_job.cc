#include "server/sidecar/node_job.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/base/log.h"
#include "server/sidecar/node_entry.h"

namespace thalweg {
namespace {

// Returns whether a codec may have steps between a bucket's first part and its result.
bool HasSteps(const CodecPolicy& policy) {
  const std::vector<CodecSpec> codecs = policy.Codecs();
  return std::any_of(codecs.begin(), codecs.end(),
                     [](const CodecSpec& codec) { return codec.kind == CodecKind::kPowerSgd; });
}

std::vector<Shard*> Pointers(const std::vector<std::shared_ptr<Shard>>& owners) {
  std::vector<Shard*> shards;
  for (const auto& owner : owners) shards.push_back(owner.get());
  return shards;
}

// Returns which of the job's shards the node hosts.
std::optional<uint32_t> OwnShard(const ipc::Hello& hello) {
  const std::vector<uint32_t> hosts = HostsOf(hello.shards);
  const auto own = std::find(hosts.begin(), hosts.end(), hello.node);
  if (own == hosts.end()) return std::nullopt;
  return static_cast<uint32_t>(own - hosts.begin());
}

// Adds the collectives that a failure interrupts on the node, unless it names them: shards know
// them by other numbers than workers.
absl::Status WithOpen(const absl::Status& reason, std::vector<std::string> open, uint32_t node) {
  const std::string words = absl::StrCat(" ", reason.message());  // an allreduce is no reduce
  std::erase_if(
      open, [&](const auto& name) { return absl::StrContains(words, absl::StrCat(" ", name)); });
  if (open.empty()) return reason;
  return absl::Status(reason.code(), absl::StrCat(reason.message(), "; under way on node ", node,
                                                  ": ", absl::StrJoin(open, ", ")));
}

// Passes on what one shard tells the job. It refers to the job weakly, because shards may hold it
// longer.
class ShardEvents : public MemberEvents {
 public:
  ShardEvents(std::weak_ptr<NodeJob> job, uint32_t shard) : job_(std::move(job)), shard_(shard) {}

  void OnResult(RoundResult result) override {
    if (const auto job = job_.lock()) job->OnResult(shard_, result);
  }
  void OnFailed(absl::Status why) override {
    if (const auto job = job_.lock()) job->Fail(why);
  }

 private:
  const std::weak_ptr<NodeJob> job_;
  const uint32_t shard_;
};

}  // namespace

std::shared_ptr<NodeJob> NodeJob::Start(const ipc::Hello& first,
                                        const ShardDirectory::JobShards& shards,
                                        NodeContext& context) {
  std::shared_ptr<NodeJob> job(new NodeJob(first, shards, context));
  NodeJob* raw = job.get();  // the destructor joins the threads
  job->run_thread_ = Thread("job-run", [raw] { raw->Run(); });
  if (HasSteps(job->spec_.codec)) {
    job->finish_thread_ = Thread("job-finish", [raw] { raw->runner_.FinishLoop(); });
  }
  job->monitor_thread_ = Thread("job-monitor", [raw] { raw->Monitor(); });
  for (uint32_t k = 0; k < job->shards_.size(); ++k) {
    job->heartbeat_threads_.emplace_back("job-heartbeat", [raw, k] { raw->SendHeartbeats(k); });
  }
  return job;
}

NodeJob::NodeJob(const ipc::Hello& first, const ShardDirectory::JobShards& shards,
                 NodeContext& context)
    : spec_(first),
      patience_{{FromMillis(first.timeout_ms)}, {FromMillis(first.step_timeout_ms)}},
      created_(Now()),
      signer_(shards.signer),
      context_(context),
      outcome_(first.job),
      report_(first, context.metrics, context.trace),
      shards_(Pointers(shards.shards), context.metrics.registry, context.trace),
      compression_(first.job, first.codec, first.num_nodes, shards_.size(), context.metrics),
      buckets_(states_, compression_, shards_),
      weights_(buckets_, shards_, patience_.silence.shard(), patience_.step.shard()),
      runner_({first.node, first.num_nodes, first.world_size, patience_.silence, context.threads,
               HasSteps(first.codec), OwnShard(first)},
              {outcome_, progress_, buckets_, states_, compression_, shards_, report_},
              {outcome_, report_, patience_.step.sidecar(), first.local_size,
               [this](uint32_t local_rank) { return roster_.NameOf(local_rank); }},
              *this),
      collectives_(
          {first.node, patience_.silence.shard(), HostsOf(first.shards)},
          {outcome_, progress_, shards_, arenas_, report_.trace(), context.metrics.collectives},
          *this),
      post_({first.node, first.num_nodes, HostsOf(first.shards)},
            {progress_, shards_, arenas_, context.metrics.collectives}, *this),
      kept_(first.local_size, outcome_),
      roster_(first, context.metrics, outcome_, [this](const absl::Status& why) { Fail(why); }),
      watchdog_(patience_, created_,
                {outcome_, roster_, buckets_, collectives_, post_, progress_, shards_}) {}

void NodeJob::Stop() {
  outcome_.End();
  WakeAll();
  run_thread_.Join();
  finish_thread_.Join();
  collectives_.Stop();
  monitor_thread_.Join();
  for (Thread& thread : heartbeat_threads_) thread.Join();
  roster_.Close(Now() + kSendTimeout);
}

void NodeJob::Fail(const absl::Status& reason) {
  const std::vector<std::string> open = collectives_.UnderWay();
  if (!outcome_.Fail(WithOpen(reason, open, spec_.node))) return;
  WakeAll();
  if (open.empty()) return;
  for (const std::string& flight : collectives_.LatestFlights(Now())) {
    spdlog::warn("job '{}': {}", spec_.job, flight);
  }
}

JobFlights NodeJob::Flights(TimePoint now) const {
  return {spec_.job, spec_.node, collectives_.Flights(now)};
}

void NodeJob::WakeAll() {
  roster_.Wake();
  runner_.Wake();
  collectives_.Wake();
  kept_.Wake();
  post_.Wake();
}

absl::Status NodeJob::ProbeGpu(const ipc::Hello& hello) const {
  if (hello.probe == DeviceMemory())
    return absl::UnavailableError("the worker has offered no memory");
  if (context_.gpus == nullptr) return absl::UnavailableError("this sidecar has no GPU");
  return context_.gpus->Probe(hello.probe);
}

absl::Status NodeJob::AddWorker(const ipc::Hello& hello, std::shared_ptr<Connection> connection) {
  absl::Status refusal = roster_.CheckSameJob(hello);
  const absl::Status shares_gpu = refusal.ok() ? ProbeGpu(hello) : refusal;
  THALWEG_RETURN_IF_ERROR(outcome_.Check());
  if (!refusal.ok() && !roster_.has_gathered()) Fail(refusal);
  if (refusal.ok()) refusal = roster_.Admit(hello, std::move(connection), shares_gpu);
  if (refusal.ok()) kept_.Expect(hello.local_rank, hello.kept_buckets);
  return OfJob(spec_.job, refusal);
}

void NodeJob::OnRegisterBucket(uint32_t local_rank, const ipc::RegisterBucket& message,
                               UniqueFd arena) {
  if (spec_.node == 0 && message.id.generation > 0) {
    // The threads that hear the other workers wait for this, too, where these announce buckets.
    const auto alive = [&] {
      for (uint32_t each = 0; each < spec_.local_size; ++each) AliveOf(each)();
    };
    const absl::Status moved = states_.MoveShardResiduals(
        buckets_.All(), message.id.generation, shards_, patience_.silence.shard(), alive);
    if (!moved.ok()) return Fail(moved);
  }
  const auto bucket =
      buckets_.Announce(local_rank, roster_.NameOf(local_rank), message, std::move(arena));
  if (!bucket.ok()) return Fail(bucket.status());
  TellReady(roster_, local_rank, **bucket);
}

void NodeJob::OnSubmit(uint32_t local_rank, const ipc::Submit& message) {
  const absl::Status status = runner_.Submit(local_rank, message);
  if (!status.ok()) Fail(status);
}

void NodeJob::OnCollect(uint32_t local_rank, ipc::Collect message) {
  const absl::Status status = collectives_.Collect(local_rank, std::move(message));
  if (!status.ok()) Fail(status);
}

absl::Status NodeJob::OnMakeGroup(uint32_t local_rank, const ipc::MakeGroup& message) {
  THALWEG_RETURN_IF_ERROR(collectives_.MakeGroup(local_rank, message));
  post_.MakeGroup(local_rank, message);
  return absl::OkStatus();
}

void NodeJob::OnSend(uint32_t local_rank, ipc::Send message) {
  const absl::Status status = post_.Send(local_rank, std::move(message));
  if (!status.ok()) Fail(status);
}

void NodeJob::OnReceive(uint32_t local_rank, const ipc::Receive& message) {
  const absl::Status status = post_.Receive(local_rank, message);
  if (!status.ok()) Fail(status);
}

void NodeJob::OnResult(uint32_t shard, const RoundResult& result) {
  if (IsLetter(result.id)) return post_.OnLetter(result);
  IsOneShot(result.id) ? collectives_.OnResult(shard, result) : runner_.OnResult(shard, result);
}

void NodeJob::OnComplete(const ipc::Complete& message) {
  report_.NoteWorkers(message.workers);
  roster_.TellAll(message);
}

std::function<void(uint32_t, const ipc::Message&)> NodeJob::Poster() {
  return [job = weak_from_this()](uint32_t local_rank, const ipc::Message& message) {
    if (const auto alive = job.lock()) alive->roster_.Tell(local_rank, message);
  };
}

void NodeJob::OnGetCodecState(uint32_t local_rank) {
  ShardGroup* const shards = spec_.node == 0 ? &shards_ : nullptr;
  const auto arena =
      states_.Save(buckets_.All(), shards, patience_.silence.shard(), AliveOf(local_rank));
  if (!arena.ok()) return Fail(arena.status());
  roster_.Tell(local_rank, ipc::CodecState{arena->payload_bytes()}, arena->fd());
}

void NodeJob::OnCodecState(uint32_t local_rank, const ipc::CodecState& message, UniqueFd fd) {
  const auto arena = BucketArena::Open(std::move(fd), message.bytes);
  const absl::Status status =
      arena.ok() ? states_.Load(buckets_.All(), *arena, spec_.node == 0) : arena.status();
  if (status.ok()) return;
  Fail(absl::Status(status.code(),
                    absl::StrCat(roster_.NameOf(local_rank), ": ", status.message())));
}

void NodeJob::OnSetSettings(uint32_t local_rank, const ipc::SetSettings& message) {
  const absl::Status status = weights_.SetSettings(roster_.NameOf(local_rank), message);
  if (!status.ok()) Fail(status);
}

void NodeJob::OnGetSnapshots(uint32_t local_rank, const ipc::GetSnapshots& message) {
  const auto answer = weights_.Snapshots(message, AliveOf(local_rank));
  if (!answer.ok()) return Fail(answer.status());
  roster_.Tell(local_rank, *answer);
}

void NodeJob::OnGetWeights(uint32_t local_rank, const ipc::GetWeights& message) {
  const auto read = weights_.Read(message, AliveOf(local_rank));
  if (!read.ok()) return Fail(read.status());
  roster_.Tell(local_rank, read->first, read->second.fd());
}

void NodeJob::OnWeights(uint32_t local_rank, const ipc::Weights& message, UniqueFd arena) {
  const absl::Status status = weights_.Write(message, std::move(arena), AliveOf(local_rank));
  if (!status.ok()) return Fail(status);
  roster_.Tell(local_rank, ipc::WeightsTaken{message.id, message.slice});
}

std::function<void()> NodeJob::AliveOf(uint32_t local_rank) {
  return [this, local_rank] {
    OnHeard(local_rank);
    roster_.Tell(local_rank, ipc::Alive{});
  };
}

void NodeJob::Refuse(uint32_t local_rank, const absl::Status& why) {
  roster_.Tell(local_rank, ipc::Fail{why.code(), std::string(why.message())});
  roster_.Flush(local_rank, Now() + kSendTimeout);
}

void NodeJob::WorkerLeft(uint32_t local_rank, const absl::Status& reason) {
  const Roster::Departure departure = roster_.Leave(local_rank, reason);
  // Before the runner and the shards know, so that nobody finds the worker or the node gone and
  // gives that as the reason.
  if (!departure.failure.ok()) Fail(departure.failure);
  if (departure.was_last) {
    // What the workers have sent may still be on its way.
    const size_t untaken =
        post_.Drain(Now() + patience_.silence.sidecar(), [this] { return !outcome_.Check().ok(); });
    if (untaken > 0 && outcome_.Check().ok()) {
      spdlog::warn(
          "job '{}': node {} leaves before the other workers have received {} of its messages",
          spec_.job, spec_.node, untaken);
    }
    outcome_.End();
    return WakeAll();
  }
  const std::string name = roster_.NameOf(local_rank);
  for (const absl::Status& missed :
       {runner_.OnWorkerLeft(local_rank, name), collectives_.OnWorkerLeft(local_rank, name),
        post_.OnWorkerLeft(local_rank, name)}) {
    if (!missed.ok()) Fail(missed);
  }
}

void NodeJob::ReleaseWorker(uint32_t local_rank) {
  // No round begins without the worker; one that has begun ends, or fails.
  runner_.WaitUntilIdle(Now() + patience_.silence.sidecar());
  for (const auto& bucket : buckets_.All()) bucket->memory().DropInput(local_rank);
}

void NodeJob::Run() {
  absl::Status status = roster_.Gather();
  if (status.ok()) {
    const std::weak_ptr<NodeJob> self = weak_from_this();
    NodeEntry entry(
        {spec_, patience_, context_, signer_, shards_, compression_, buckets_, kept_, roster_},
        [&](uint32_t shard) { return std::make_shared<ShardEvents>(self, shard); });
    status = entry.Enter(created_ + patience_.silence.sidecar());
  }
  if (status.ok()) {
    runner_.RunLoop();
  } else {
    Fail(status);
  }
}

void NodeJob::Monitor() {
  watchdog_.Watch([this](const absl::Status& late) { Fail(late); },
                  [this] { roster_.TellAll(ipc::Alive{}); });
  const absl::Status failure = outcome_.failure();
  context_.metrics.jobs_ended.Add(failure.code());
  if (!failure.ok()) {
    spdlog::error("{}", Text(failure));
    roster_.TellAll(ipc::Fail{failure.code(), std::string(failure.message())});
  }
  shards_.Leave(failure);
}

void NodeJob::SendHeartbeats(uint32_t shard) {
  const Duration interval = shards_.heartbeat_interval();
  // They are spread over the interval, so that a node does not speak to all shards at once.
  TimePoint next = Now() + interval * (shard + 1) / shards_.size();
  while (!outcome_.WaitForEnd(next)) {
    next = Now() + interval;
    if (shard == 0) {
      arenas_.GiveUpIdle(Now(), [this](uint32_t local_rank, const ipc::ShareArena& message,
                                       int fd) { roster_.Tell(local_rank, message, fd); });
    }
    const auto lost = shards_.Heartbeat(shard);
    if (!lost.ok()) {
      Fail(lost.status());
      continue;
    }
    for (const LostNode& each : *lost) {
      if (!roster_.TellLost({each.node, each.why})) continue;
      spdlog::warn("job '{}': goes on without {}: {}", spec_.job, each.node, each.why);
    }
  }
}

}  // namespace thalweg
