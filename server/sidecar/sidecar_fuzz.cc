// Messages of workers, in any order, to a sidecar: it answers with messages, hangs up on those that
// break the protocol, and takes the next job. Each step is a byte for the worker and whether it
// waits for an answer, one for the type of a message, one for its descriptor, two for a length, and
// so many bytes of body.

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/fuzzing.h"
#include "core/ipc/bucket_arena.h"
#include "server/aggregator/aggregator.h"
#include "server/base/metrics.h"
#include "server/sidecar/device/cpu_device.h"
#include "server/sidecar/sidecar.h"

namespace thalweg {
namespace {

constexpr size_t kWorkers = 3;
constexpr uint64_t kMostElems = 1 << 20;  // workers are trusted not to take a machine's memory
constexpr uint64_t kMostMillis = 500;
constexpr Duration kPatience = std::chrono::seconds(9);  // below libFuzzer's
constexpr uint16_t kHostShard = 12;
constexpr Duration kAnswer = std::chrono::milliseconds(20);

// A Node is a sidecar with a shard, which serves all inputs.
struct Node {
  Node() {
    spdlog::set_level(spdlog::level::off);
    folder = absl::StrCat(std::filesystem::temp_directory_path().string(), "/fuzz-", getpid());
    std::filesystem::create_directory(folder);
    auto started = Sidecar::Start({Socket(), &directory, &device}, registry);
    Promise(started.ok(), "a sidecar starts");
    sidecar = *std::move(started);
  }
  ~Node() {
    sidecar.reset();
    std::filesystem::remove_all(folder);
  }
  std::string Socket() const { return folder + "/sock"; }

  std::string folder;
  MetricRegistry registry;
  CpuDevice device;
  Aggregator shard{{}, registry};
  ShardDirectory directory{
      {.configured = {&shard}, .addresses = {}, .hosted = {}, .connect = {}, .make_signer = {}}};
  std::unique_ptr<Sidecar> sidecar;
};

Node& TheNode() {
  static Node node;
  return node;
}

std::unique_ptr<Connection> Connect() {
  auto connection = Connection::Connect(TheNode().Socket(), Now() + kPatience);
  Promise(connection.ok(), "workers can connect");
  return *std::move(connection);
}

ipc::Hello HelloOf(const std::string& job, uint32_t rank, uint32_t size) {
  ipc::Hello hello;
  hello.ipc_version = kIpcVersion;
  hello.job = job;
  hello.rank = hello.local_rank = rank;
  hello.world_size = hello.local_size = size;
  hello.num_nodes = 1;
  hello.node_name = "host";
  hello.chunk_bytes = kMinChunkBytes;
  hello.timeout_ms = hello.step_timeout_ms = 10'000;
  return hello;
}

// Keeps a message from waiting for other nodes, or for long, or from taking much memory.
void Bound(ipc::Message& message) {
  if (auto* hello = std::get_if<ipc::Hello>(&message)) {
    hello->job = "fuzz";
    hello->node = 0;
    hello->num_nodes = 1;
    hello->timeout_ms = std::min(hello->timeout_ms, kMostMillis);
    hello->step_timeout_ms = std::min(hello->step_timeout_ms, kMostMillis);
  }
  if (auto* bucket = std::get_if<ipc::RegisterBucket>(&message)) {
    if (bucket->layout.Elems() > kMostElems) bucket->layout.tensors.clear();
  }
}

uint64_t ArenaBytesOf(const ipc::Message& message) {
  uint64_t bytes = 0;
  if (const auto* bucket = std::get_if<ipc::RegisterBucket>(&message)) {
    bytes = bucket->layout.Elems() * SizeOf(bucket->layout.dtype);
  }
  if (const auto* state = std::get_if<ipc::CodecState>(&message)) bytes = state->bytes;
  if (const auto* arena = std::get_if<ipc::ShareArena>(&message)) bytes = arena->bytes;
  if (const auto* weights = std::get_if<ipc::Weights>(&message)) bytes = weights->bytes;
  return std::min(bytes, kMostElems * sizeof(double));
}

class Script {
 public:
  explicit Script(FuzzInput input) : input_(input) {}

  void Run() {
    while (!input_.IsEmpty()) Step();
    for (auto& worker : workers_) worker.reset();
    AwaitEnd();
    Greet();
    AwaitEnd();
  }

 private:
  void Step() {
    const uint8_t who = input_.Byte();
    const uint16_t type = input_.Byte();
    const uint8_t fd = input_.Byte();
    std::string text = input_.Text(input_.Short());
    if (type == kHostShard) SetVersion(&text);
    const auto body = std::as_bytes(std::span(text.data(), text.size()));
    std::unique_ptr<Connection>& worker = workers_[who % kWorkers];
    if (type == 255) return worker.reset();  // it is gone, without a word
    if (worker == nullptr) worker = Connect();
    Send(*worker, type, fd, body);
    if (who >= 128) Receive(*worker);
  }

  // Sidecars have nothing more to say to workers of another version.
  static void SetVersion(std::string* body) {
    std::memcpy(body->data(), &kIpcVersion, std::min(body->size(), sizeof kIpcVersion));
  }

  // Sends what is a message in bounds, and bytes that are none as they are.
  static void Send(Connection& worker, uint16_t type, uint8_t fd, std::span<const std::byte> body) {
    auto message = type == 0 ? HelloOf("fuzz", fd % kWorkers, 1 + fd / 4 % kWorkers)
                             : ipc::ParseBody(type, body);
    if (!message.ok()) return SendBytes(worker, type, body);
    Bound(*message);
    const uint64_t right = ArenaBytesOf(*message);
    const auto arena = BucketArena::Create("fuzz", fd % 4 == 3 ? right / 2 : right, false);
    if (type == 0 || fd % 4 == 0 || !arena.ok()) return worker.Send(*message).IgnoreError();
    const_cast<BucketArena&>(*arena).PublishReady(fd % 4 == 2 ? 1 : ~uint32_t{0});
    worker.Send(*message, arena->fd()).IgnoreError();
  }

  static void SendBytes(Connection& worker, uint16_t type, std::span<const std::byte> body) {
    std::string frame = ipc::EncodeFrame(ipc::Leave{}, false);
    frame[4] = static_cast<char>(type);
    frame[8] = static_cast<char>(body.size());
    frame[9] = static_cast<char>(body.size() >> 8);
    frame.append(reinterpret_cast<const char*>(body.data()), body.size());
    worker.SendSome(frame).IgnoreError();
  }

  static void Receive(Connection& worker) {
    const auto received = worker.Receive(Now() + kAnswer);
    Promise(!absl::IsInvalidArgument(received.status()), "a sidecar speaks the protocol");
  }

  // Waits until the sidecar has let go of everybody.
  static void AwaitEnd() {
    const TimePoint deadline = Now() + kPatience;
    while (TheNode().sidecar->Reap().now > 0) {
      Promise(Now() < deadline, "a sidecar hangs up on those that are gone");
      std::this_thread::yield();
    }
    Promise(TheNode().shard.num_jobs() == 0, "no job stays without workers");
  }

  static void Greet() {
    const auto worker = Connect();
    worker->Send(HelloOf("next", 0, 1)).IgnoreError();
    const auto answer = worker->Receive(Now() + kPatience);
    Promise(answer.ok() && std::holds_alternative<ipc::Welcome>(answer->message),
            "a sidecar takes the next job");
    worker->Send(ipc::Leave{}).IgnoreError();
  }

  FuzzInput input_;
  std::array<std::unique_ptr<Connection>, kWorkers> workers_;
};

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Script(thalweg::FuzzInput(data, size)).Run();
  return 0;
}
