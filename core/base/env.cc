#include "core/base/env.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace thalweg {

namespace {

constexpr EnvVar kVars[] = {
    {"THALWEG_AGGREGATORS", "",
     "host:port of each aggregator, separated by commas, in the same order everywhere"},
    {"THALWEG_BACKEND", "0", "1: the default process group of torch.distributed is thalweg's"},
    {"THALWEG_CHANNELS", "auto", "TCP connections from a sidecar to each shard, 1 to 16"},
    {"THALWEG_CHUNK_BYTES", "auto", "bytes of gradient that travel as one chunk"},
    {"THALWEG_CODEC", "fp32", "how fp32 gradients cross the network, e.g. fp16 or powersgd:4"},
    {"THALWEG_COMPAT", "", "1: torch has the names of AIAK-Training; apex: also a module apex"},
    {"THALWEG_CPU_CAPABILITY", "", "for tests: default, avx2 or avx512; empty: what the CPU has"},
    {"THALWEG_CPUS", "", "cores on which a server program runs, e.g. 0-3,8; empty: all"},
    {"THALWEG_ELASTIC", "", "host or host:port of every node of a training that may lose some"},
    {"THALWEG_ELASTIC_NODE", "", "this node's place among those, from 0; empty: by its address"},
    {"THALWEG_ENABLE", "", "1: scripts use Thalweg without code; 0: they never do"},
    {"THALWEG_FP16_COMPRESSION", "0", "1: without code, gradients cross the network as fp16"},
    {"THALWEG_FUSED_OPTIMIZER", "0", "1: torch's SGD, Adam, AdamW run fused"},
    {"THALWEG_HIERARCHICAL_ALLREDUCE", "0", "1: without code, nodes are reduced first"},
    {"THALWEG_HTTP", "", "host:port for the live page, /metrics, /healthz, /readyz; empty: none"},
    {"THALWEG_HTTP_TOKEN_FILE", "", "file with the token that readers of HTTP give; empty: none"},
    {"THALWEG_INTERFACE", "", "interface or address at which other hosts reach this one's shard"},
    {"THALWEG_JOB", "", "name of the training job; default: made up by rank 0"},
    {"THALWEG_LISTEN", "0.0.0.0:7070", "host:port on which an aggregator serves gRPC"},
    {"THALWEG_LOCAL_SHARDS", "auto", "1: sidecars host shards; 0: none does; auto: if they can"},
    {"THALWEG_LOG", "info", "least severe message shown: trace, debug, info, warn, error or off"},
    {"THALWEG_MATRIX_APPROXIMATION_RANK", "1", "of PowerSGD that is switched on without code"},
    {"THALWEG_MEMORY_LIMIT", "auto", "memory that a shard's jobs may use, e.g. 3G"},
    {"THALWEG_NCCL_LIBRARY", "libnccl.so.2", "NCCL, for workers of a node on several GPUs"},
    {"THALWEG_NODE_REDUCE", "sidecar", "who sums a node's gradients: sidecar or workers"},
    {"THALWEG_POLICY", "",
     "file that says who may take part in which jobs; empty: everybody in all"},
    {"THALWEG_POWERSGD_COMPRESSION", "0", "1: without code, PowerSGD"},
    {"THALWEG_PS", "",
     "without code, the optimizer moves to the shards: auto, sgd, adam, adamw, lamb"},
    {"THALWEG_PS_EVERY", "", "steps between two exchanges of local updates without code"},
    {"THALWEG_PS_MODE", "", "local: without code, workers step alone and exchange now and then"},
    {"THALWEG_RESIDUALS", "", "folder for what nodes hold back of gradients; empty: none"},
    {"THALWEG_SHARD_PORTS", "0", "port or FIRST-LAST at which sidecars host shards; 0: any"},
    {"THALWEG_SIDECAR", "", "Unix socket of this node's sidecar; empty: start one"},
    {"THALWEG_SNAPSHOT_EVERY", "0", "steps between snapshots of an optimizer on shards; 0: none"},
    {"THALWEG_START_COMPRESS_ITER", "1000", "iteration at which PowerSGD without code starts"},
    {"THALWEG_STATE_DIR", "", "folder of an aggregator's snapshots of weights; empty: none"},
    {"THALWEG_STEP_TIMEOUT", "auto", "seconds that a worker may come late to a step"},
    {"THALWEG_THREADS", "auto", "threads of a sidecar or aggregator that sum, send and receive"},
    {"THALWEG_TIMEOUT", "30", "seconds without a sign of life after which a job fails"},
    {"THALWEG_TLS_CA", "", "PEM file of the CAs by which sidecars and shards judge each other"},
    {"THALWEG_TLS_CERT", "", "PEM file of a program's certificate; empty: no TLS"},
    {"THALWEG_TLS_KEY", "", "PEM file of that certificate's key"},
    {"THALWEG_TRACE", "", "folder for files of what happens to every bucket; empty: none"},
    {"THALWEG_WEIGHT", "auto", "this aggregator's share of the gradients relative to the others'"},
    {"THALWEG_WINDOW_CHUNKS", "auto", "chunks a node may have sent to a shard unanswered"},
    {"THALWEG_LOSS_GRACE", "3", "seconds of silence after which a node is lost"},
    {"THALWEG_MIN_NODES", "0", "nodes with which a job goes on when others are lost; 0: all"},
    {"THALWEG_RECONNECT", "10",
     "seconds in which a broken connection, an aggregator or a sidecar may come back; 0: none"},
};

}  // namespace

const std::vector<EnvVar>& KnownEnvVars() {
  static const std::vector<EnvVar> vars(std::begin(kVars), std::end(kVars));
  return vars;
}

std::string GetEnv(const char* name) {
  const auto& vars = KnownEnvVars();
  const auto var = std::find_if(vars.begin(), vars.end(),
                                [&](const EnvVar& v) { return std::strcmp(v.name, name) == 0; });
  const char* value = std::getenv(name);
  if (value != nullptr && *value != '\0') return value;
  return var == vars.end() ? "" : var->default_value;
}

std::vector<std::string> UnknownEnvVars() {
  std::vector<std::string> unknown;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name.rfind("THALWEG_", 0) != 0) continue;
    const auto& vars = KnownEnvVars();
    const bool known =
        std::any_of(vars.begin(), vars.end(), [&](const EnvVar& v) { return name == v.name; });
    if (!known) unknown.push_back(name);
  }
  std::sort(unknown.begin(), unknown.end());
  return unknown;
}

}  // namespace thalweg
