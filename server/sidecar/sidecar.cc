#include "server/sidecar/sidecar.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/loss_scale.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "core/exchange/of_job.h"
#include "server/base/log.h"

namespace thalweg {
namespace {

// A process that has connected may take this long to say who it is.
constexpr Duration kHelloTimeout = std::chrono::seconds(10);
constexpr Duration kLookAtStop = std::chrono::milliseconds(500);
constexpr uint32_t kMaxLocalWorkers = 1024;

absl::Status CheckHello(const ipc::Hello& h) {
  const auto invalid = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("job '", h.job, "', rank ", h.rank, ": ", what));
  };
  if (h.job.empty()) return invalid("the job has no name");
  if (h.rank >= h.world_size) {
    return invalid(absl::StrCat("the world has only ", h.world_size, " workers"));
  }
  if (h.node >= h.num_nodes) return invalid(absl::StrCat("node ", h.node, " of ", h.num_nodes));
  if (h.local_rank >= h.local_size || h.local_size > kMaxLocalWorkers) {
    return invalid(absl::StrCat("local rank ", h.local_rank, " of ", h.local_size));
  }
  if (h.chunk_bytes != 0 && (h.chunk_bytes < kMinChunkBytes || h.chunk_bytes > kMaxChunkBytes)) {
    return invalid(absl::StrCat("chunks must have ", kMinChunkBytes, " to ", kMaxChunkBytes,
                                " bytes, got ", h.chunk_bytes));
  }
  if (h.known && h.chunk_bytes == 0) return invalid("it goes on with chunks of 0 bytes");
  if (h.min_nodes > h.num_nodes) {
    return invalid(absl::StrCat("it goes on with ", h.min_nodes, " of ", h.num_nodes, " nodes"));
  }
  if (h.timeout_ms == 0 || h.step_timeout_ms == 0) {
    return invalid("the timeouts must be positive");
  }
  return absl::OkStatus();
}

absl::Status Unexpected(const ipc::Message& message) {
  return absl::InvalidArgumentError(
      absl::StrCat("a worker must not send ", Name(message), " at this point"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sidecar>> Sidecar::Start(const Options& options,
                                                        MetricRegistry& registry) {
  std::unique_ptr<Sidecar> sidecar(new Sidecar(options, registry));
  THALWEG_ASSIGN_OR_RETURN(sidecar->listener_, Listener::Bind(options.socket_path));
  sidecar->accept_thread_ = Thread("sidecar-accept", [raw = sidecar.get()] { raw->AcceptLoop(); });
  return sidecar;
}

Sidecar::Sidecar(const Options& options, MetricRegistry& registry)
    : metrics_(registry), context_{*options.shards, *options.device,       options.gpus, metrics_,
                                   options.threads, options.window_chunks, options.trace} {}

Sidecar::~Sidecar() { Stop(absl::CancelledError("the sidecar is shutting down")); }

void Sidecar::AcceptLoop() {
  while (true) {
    auto accepted = listener_->Accept();
    if (absl::IsCancelled(accepted.status())) return;
    if (!accepted.ok()) {
      spdlog::error("cannot take a worker: {}", Text(accepted.status()));
      MutexLock lock(mutex_);
      // Out of descriptors: try again when a connection may have ended.
      if (changed_.WaitUntil(mutex_, Now() + kLookAtStop,
                             [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; }))
        return;
      continue;
    }
    MutexLock lock(mutex_);
    if (stopping_) return;
    ++num_connections_;
    Reader& reader = readers_.emplace_back();
    reader.connection = *std::move(accepted);
    reader.thread = Thread("worker-reader", [this, &reader, connection = reader.connection] {
      Serve(*connection, connection);
      MutexLock lock(mutex_);
      reader.done = true;
      changed_.NotifyAll();
    });
  }
}

void Sidecar::Serve(Connection& connection, const std::shared_ptr<Connection>& shared) {
  auto first = connection.Receive(Now() + kHelloTimeout);
  absl::Status status = first.status();
  const ipc::Hello* hello = first.ok() ? std::get_if<ipc::Hello>(&first->message) : nullptr;
  const auto* host = first.ok() ? std::get_if<ipc::HostShard>(&first->message) : nullptr;
  if (host != nullptr) {
    status = HostShard(connection, *host);
    if (status.ok()) return connection.Shutdown();
  } else if (status.ok() && hello == nullptr) {
    status = absl::InvalidArgumentError(
        absl::StrCat("expected Hello as the first message, got ", Name(first->message)));
  }
  if (status.ok()) {
    auto job = Admit(*hello, shared);
    status = job.status();
    if (status.ok()) {
      status = TakeKept(connection, **job, *hello);
      if (status.ok()) status = ReadMessages(connection, **job, hello->local_rank);
      if (absl::IsInvalidArgument(status)) {
        // The peer gets the reason too; it hears no broadcast once it has left the job.
        (*job)->Refuse(hello->local_rank, status);
      }
      (*job)->WorkerLeft(hello->local_rank, status);
      (*job)->ReleaseWorker(hello->local_rank);
      connection.Shutdown();
      return;
    }
  }
  spdlog::warn("refused a worker: {}", Text(status));
  connection.Send(ipc::Fail{status.code(), std::string(status.message())}).IgnoreError();
}

absl::Status Sidecar::HostShard(Connection& connection, const ipc::HostShard& request) {
  THALWEG_ASSIGN_OR_RETURN(const ShardDirectory::Offer offer, context_.shards.OfferTo(request));
  THALWEG_RETURN_IF_ERROR(connection.Send(offer.answer));
  while (true) {
    const auto received = connection.Receive(Now() + kLookAtStop);
    if (absl::IsDeadlineExceeded(received.status())) continue;
    if (absl::IsUnavailable(received.status())) return absl::OkStatus();
    THALWEG_RETURN_IF_ERROR(received.status());
    return absl::InvalidArgumentError(
        absl::StrCat("a worker must not send ", Name(received->message), " after HostShard"));
  }
}

absl::StatusOr<std::shared_ptr<NodeJob>> Sidecar::Admit(
    const ipc::Hello& hello, const std::shared_ptr<Connection>& connection) {
  THALWEG_RETURN_IF_ERROR(CheckHello(hello));
  THALWEG_ASSIGN_OR_RETURN(std::shared_ptr<NodeJob> job, FindJob(hello));
  THALWEG_RETURN_IF_ERROR(job->AddWorker(hello, connection));
  return job;
}

absl::StatusOr<std::shared_ptr<NodeJob>> Sidecar::FindJob(const ipc::Hello& hello) {
  MutexLock lock(mutex_);
  if (stopping_) return absl::UnavailableError("the sidecar is shutting down");
  const auto found = jobs_.find(hello.job);
  if (found != jobs_.end()) return found->second.job;
  auto shards = context_.shards.ShardsOf(hello);
  if (!shards.ok()) return OfJob(hello.job, shards.status());
  std::shared_ptr<NodeJob> job = NodeJob::Start(hello, *shards, context_);
  jobs_[hello.job] = {job, *std::move(shards)};
  metrics_.jobs.Set(static_cast<double>(jobs_.size()));
  return job;
}

absl::Status Sidecar::TakeKept(Connection& connection, NodeJob& job, const ipc::Hello& hello) {
  for (uint32_t left = hello.kept_buckets; left > 0; --left) {
    THALWEG_ASSIGN_OR_RETURN(Received bucket, connection.Receive(Now() + kHelloTimeout));
    auto* const kept = std::get_if<ipc::KeptBucket>(&bucket.message);
    if (kept == nullptr) return Unexpected(bucket.message);
    int follow = (kept->round > 0 ? 1 : 0) + (kept->has_codec_memory ? 1 : 0);
    THALWEG_RETURN_IF_ERROR(
        job.kept().Add(hello.local_rank, std::move(*kept), std::move(bucket.fd)));
    for (; follow > 0; --follow) {
      THALWEG_ASSIGN_OR_RETURN(Received next, connection.Receive(Now() + kHelloTimeout));
      absl::Status taken = Unexpected(next.message);
      if (const auto* const result = std::get_if<ipc::KeptResult>(&next.message)) {
        taken = job.kept().AddResult(hello.local_rank, *result, std::move(next.fd));
      } else if (const auto* const memory = std::get_if<ipc::CodecMemory>(&next.message)) {
        taken = job.kept().AddCodecMemory(hello.local_rank, *memory, std::move(next.fd));
      }
      THALWEG_RETURN_IF_ERROR(taken);
    }
  }
  return absl::OkStatus();
}

absl::Status Sidecar::ReadMessages(Connection& connection, NodeJob& job, uint32_t local_rank) {
  while (true) {
    auto received = connection.Receive(Now() + kLookAtStop);
    if (absl::IsDeadlineExceeded(received.status())) continue;
    THALWEG_RETURN_IF_ERROR(received.status());
    job.OnHeard(local_rank);
    if (std::holds_alternative<ipc::Alive>(received->message)) continue;
    if (std::holds_alternative<ipc::Leave>(received->message)) return absl::OkStatus();
    if (const auto* fail = std::get_if<ipc::Fail>(&received->message)) {
      return absl::Status(fail->code, fail->message);
    }
    if (const auto* bucket = std::get_if<ipc::RegisterBucket>(&received->message)) {
      job.OnRegisterBucket(local_rank, *bucket, std::move(received->fd));
    } else if (const auto* submit = std::get_if<ipc::Submit>(&received->message)) {
      job.OnSubmit(local_rank, *submit);
    } else if (std::holds_alternative<ipc::GetCodecState>(received->message)) {
      job.OnGetCodecState(local_rank);
    } else if (const auto* state = std::get_if<ipc::CodecState>(&received->message)) {
      job.OnCodecState(local_rank, *state, std::move(received->fd));
    } else if (const auto* settings = std::get_if<ipc::SetSettings>(&received->message)) {
      job.OnSetSettings(local_rank, *settings);
    } else if (const auto* wanted = std::get_if<ipc::GetWeights>(&received->message)) {
      job.OnGetWeights(local_rank, *wanted);
    } else if (const auto* snapshots = std::get_if<ipc::GetSnapshots>(&received->message)) {
      job.OnGetSnapshots(local_rank, *snapshots);
    } else if (const auto* weights = std::get_if<ipc::Weights>(&received->message)) {
      job.OnWeights(local_rank, *weights, std::move(received->fd));
    } else if (const auto* group = std::get_if<ipc::MakeGroup>(&received->message)) {
      THALWEG_RETURN_IF_ERROR(job.OnMakeGroup(local_rank, *group));
    } else if (const auto* arena = std::get_if<ipc::ShareArena>(&received->message)) {
      THALWEG_RETURN_IF_ERROR(job.OnShareArena(local_rank, *arena, std::move(received->fd)));
    } else if (auto* collect = std::get_if<ipc::Collect>(&received->message)) {
      job.OnCollect(local_rank, std::move(*collect));
    } else if (auto* send = std::get_if<ipc::Send>(&received->message)) {
      job.OnSend(local_rank, std::move(*send));
    } else if (const auto* receive = std::get_if<ipc::Receive>(&received->message)) {
      job.OnReceive(local_rank, *receive);
    } else if (const auto* taken = std::get_if<ipc::Taken>(&received->message)) {
      THALWEG_RETURN_IF_ERROR(job.OnTaken(local_rank, *taken));
    } else if (const auto* precision = std::get_if<ipc::Precision>(&received->message)) {
      THALWEG_RETURN_IF_ERROR(TakePrecision(*precision, job, local_rank));
    } else {
      return Unexpected(received->message);
    }
  }
}

absl::Status Sidecar::TakePrecision(const ipc::Precision& precision, NodeJob& job,
                                    uint32_t local_rank) {
  // All workers of a job skip the same steps: they are not to be counted once for each.
  if (local_rank != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "local rank ", local_rank, " sent Precision, expected it from local rank 0 only"));
  }
  if (!IsLossScale(precision.loss_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Precision has loss scale ", precision.loss_scale,
                     ", expected a positive, finite one, or 0 for none"));
  }
  job.OnLossScale(precision.loss_scale);
  metrics_.loss_scale.Set(precision.loss_scale);
  metrics_.skipped_steps.Add(static_cast<double>(precision.skipped_steps));
  return absl::OkStatus();
}

std::vector<JobFlights> Sidecar::Flights(TimePoint now) {
  std::vector<std::shared_ptr<NodeJob>> jobs;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, entry] : jobs_) jobs.push_back(entry.job);
  }
  std::vector<JobFlights> flights;
  for (const std::shared_ptr<NodeJob>& job : jobs) flights.push_back(job->Flights(now));
  return flights;
}

Sidecar::Connections Sidecar::Reap() {
  std::list<Reader> ended;
  std::vector<Entry> over;
  Connections connections;
  {
    MutexLock lock(mutex_);
    for (auto reader = readers_.begin(); reader != readers_.end();) {
      const auto next = std::next(reader);
      if (reader->done) ended.splice(ended.end(), readers_, reader);
      reader = next;
    }
    for (auto job = jobs_.begin(); job != jobs_.end();) {
      if (job->second.job->IsFinished()) {
        over.push_back(std::move(job->second));
        job = jobs_.erase(job);
      } else {
        ++job;
      }
    }
    metrics_.jobs.Set(static_cast<double>(jobs_.size()));
    connections = {readers_.size(), num_connections_};
  }
  // Both join threads, which may need the lock.
  ended.clear();
  for (Entry& entry : over) {
    entry.shards.invitation.reset();  // else it would wait here for nodes that have not joined
    entry.job->Stop();
  }
  over.clear();
  context_.shards.Prune();
  return connections;
}

void Sidecar::StopAccepting() {
  if (listener_ != nullptr) listener_->Stop();
  accept_thread_.Join();
}

void Sidecar::Stop(const absl::Status& why) {
  std::vector<Entry> jobs;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (auto& [name, entry] : jobs_) {
      jobs.push_back({entry.job, {{}, nullptr, std::exchange(entry.shards.invitation, nullptr)}});
    }
    changed_.NotifyAll();
  }
  StopAccepting();
  for (Entry& entry : jobs) {  // they end at the same time
    entry.job->Fail(why);
    entry.shards.invitation.reset();  // as in Reap
  }
  for (Entry& entry : jobs) entry.job->Stop();  // after it has told its workers why
  MutexLock lock(mutex_);
  for (Reader& reader : readers_) reader.connection->Shutdown();
  const auto all_done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const Reader& reader : readers_) {
      if (!reader.done) return false;
    }
    return true;
  };
  // Every reader looks around twice a second at the latest.
  changed_.WaitUntil(mutex_, kUntilStopped, all_done);
  std::list<Reader> readers;
  readers.swap(readers_);
  jobs_.clear();
}

}  // namespace thalweg
