// This file defines DefineSnapshots().
#include "client/torch/snapshot_module.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/snapshot/snapshot_file.h"

namespace py = pybind11;

namespace thalweg {
namespace {

template <typename Value>
Value ValueOf(absl::StatusOr<Value> read) {
  if (read.ok()) return *std::move(read);
  throw std::runtime_error(absl::StrCat("thalweg: ", read.status().message()));
}

py::tuple KeyOf(const BucketId& id) { return py::make_tuple(id.index, id.generation, id.part); }

py::dict Described(const SnapshotHeader& header) {
  py::dict buckets;
  for (const auto& [id, description] : header.buckets) buckets[KeyOf(id)] = description;
  py::dict described;
  described["job"] = header.job;
  described["identity"] = absl::BytesToHexString(header.identity);
  described["branch"] = header.id.branch;
  described["step"] = header.id.step;
  described["shard"] = header.shard;
  described["num_shards"] = header.num_shards;
  described["buckets"] = buckets;
  return described;
}

at::Tensor TensorOf(const std::vector<float>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  if (!values.empty()) {
    std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(float));
  }
  return tensor;
}

py::tuple ReadWhole(const std::string& path) {
  absl::StatusOr<Snapshot> read;
  {
    const py::gil_scoped_release release;
    read = ReadSnapshot(path);
  }
  const Snapshot snapshot = ValueOf(std::move(read));
  py::list chunks;
  for (const SnapshotChunk& chunk : snapshot.chunks) {
    py::list slices;
    slices.append(TensorOf(chunk.weights.params));
    for (const auto& moment : chunk.weights.moments) slices.append(TensorOf(moment));
    chunks.append(py::make_tuple(KeyOf(chunk.bucket), chunk.chunk, chunk.weights.steps, slices));
  }
  return py::make_tuple(Described(snapshot.header), chunks);
}

}  // namespace

void DefineSnapshots(py::module_& m) {
  m.def(
      "read_snapshot_header",
      [](const std::string& path) { return Described(ValueOf(ReadSnapshotHeader(path))); },
      py::arg("path"));
  m.def("read_snapshot", &ReadWhole, py::arg("path"));
}

}  // namespace thalweg
