// This is the extension module thalweg._C, whose contract _C.pyi states in Python terms.
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/completions.h"
#include "client/core/connects.h"
#include "client/core/patience.h"
#include "client/core/process_trace.h"
#include "client/core/session.h"
#include "client/core/shard_offer.h"
#include "client/torch/ddp_hook.h"
#include "client/torch/int8_blocks.h"
#include "client/torch/optim_module.h"
#include "client/torch/process_group.h"
#include "client/torch/reducer_access.h"
#include "client/torch/served_bucket.h"
#include "client/torch/served_module.h"
#include "client/torch/snapshot_module.h"
#include "client/torch/throw.h"
#include "core/base/env.h"
#include "kernels/cast/cpu_capability.h"

namespace py = pybind11;

namespace thalweg {
namespace {

template <typename Call>
auto WithoutGil(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

std::shared_ptr<Session> Connect(const std::string& sidecar_path, const std::string& job,
                                 uint32_t rank, uint32_t world_size, uint32_t node,
                                 uint32_t num_nodes, const std::string& node_name,
                                 uint32_t local_rank, uint32_t local_size, const std::string& codec,
                                 uint64_t chunk_bytes, double timeout,
                                 std::optional<double> step_timeout, std::optional<int> cuda_device,
                                 const std::vector<std::string>& shards,
                                 const std::vector<int>& hosts, const std::string& secret,
                                 uint32_t min_nodes) {
  if (shards.size() != hosts.size()) {
    throw py::value_error(absl::StrCat("thalweg: ", shards.size(), " shards, but ", hosts.size(),
                                       " hosts: there must be one for each"));
  }
  SessionOptions options{.sidecar_path = sidecar_path,
                         .job = job,
                         .rank = rank,
                         .world_size = world_size,
                         .node = node,
                         .num_nodes = num_nodes,
                         .node_name = node_name,
                         .local_rank = local_rank,
                         .local_size = local_size,
                         .codec = OrThrow(CodecPolicy::Parse(codec)),
                         .chunk_bytes = chunk_bytes,
                         .timeout = FromSeconds(timeout),
                         .step_timeout = FromSeconds(step_timeout.value_or(timeout)),
                         .reconnect = OrThrow(ReconnectFromEnv()),
                         .min_nodes = min_nodes,
                         .loss_grace = OrThrow(LossGraceFromEnv()),
                         .secret = secret};
  for (size_t k = 0; k < shards.size(); ++k) {
    const uint32_t host = hosts[k] < 0 ? kNoHost : static_cast<uint32_t>(hosts[k]);
    options.shards.push_back({shards[k], host});
  }
  options.trace = OrThrow(ProcessTrace());
  c10::OptionalDeviceGuard guard;
  if (cuda_device.has_value()) {
    options.device = OrThrow(OpenCudaDevice(*cuda_device));
    options.free_device_memory = [] { at::accelerator::emptyCache(); };
    guard.reset_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*cuda_device)));
  }
  return OrThrow(WithoutGil([&] { return Session::Connect(options); }));
}

std::unique_ptr<ShardOffer> AskForShard(const std::string& sidecar_path, const std::string& job,
                                        const std::string& secret, double timeout) {
  return OrThrow(
      WithoutGil([&] { return ShardOffer::Ask(sidecar_path, job, secret, FromSeconds(timeout)); }));
}

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

std::unique_ptr<DdpHook> MakeHook(const std::shared_ptr<Session>& session,
                                  const NamedParameters& named_parameters,
                                  const c10d::Reducer* reducer) {
  DdpHook::Parameters parameters;
  for (size_t i = 0; i < named_parameters.size(); ++i) {
    const auto& [name, parameter] = named_parameters[i];
    parameters[parameter.unsafeGetTensorImpl()] = {name, i,
                                                   static_cast<uint64_t>(parameter.numel())};
  }
  const c10::Device device =
      named_parameters.empty() ? c10::Device(c10::kCPU) : named_parameters[0].second.device();
  if (device.is_cpu() != (session->device() == nullptr)) {
    throw std::runtime_error(absl::StrCat(
        "thalweg: the parameters are on ", device.str(), ", but the session was connected for ",
        device.is_cpu() ? "a device" : "the CPU", ": connect it for where they are"));
  }
  return std::make_unique<DdpHook>(session, std::move(parameters), device, reducer);
}

void Attach(const std::shared_ptr<Session>& session, c10d::Reducer& reducer,
            const NamedParameters& named_parameters) {
  reducer.register_comm_hook(MakeHook(session, named_parameters, &reducer));
}

std::unique_ptr<DdpHook> MakeInnerHook(const std::shared_ptr<Session>& session,
                                       const NamedParameters& named_parameters) {
  return MakeHook(session, named_parameters, nullptr);
}

std::chrono::milliseconds ToMillis(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(FromSeconds(seconds));
}

c10::intrusive_ptr<ProcessGroup> MakeProcessGroup(const std::shared_ptr<Session>& session,
                                                  uint32_t number, uint32_t rank,
                                                  const std::vector<uint32_t>& nodes,
                                                  const std::string& name, double timeout,
                                                  const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<ProcessGroup>(session, WorkerGroup{number, rank, nodes, name}, store,
                                           ToMillis(timeout));
}

c10::intrusive_ptr<ProcessGroup> MakePart(ProcessGroup& group,
                                          const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks, const std::string& name,
                                          double timeout) {
  return group.MakePart(*store, ranks, name, ToMillis(timeout));
}

std::shared_ptr<torch::jit::PythonFutureWrapper> RunHook(DdpHook& hook, c10d::GradBucket& bucket) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    py::gil_scoped_release release;
    future = hook.runHook(bucket);
  }
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

void SetError(torch::jit::PythonFutureWrapper& future, const std::string& text) {
  // Python's own set_exception() hides the error from torch's C++ code, such as DDP's reducer.
  future.fut->setError(std::make_exception_ptr(std::runtime_error(text)));
}

py::dict Stats(const Session& session) {
  const SessionStats stats = session.stats();
  py::dict result;
  result["rounds"] = stats.rounds;
  result["raw_bytes"] = stats.raw_bytes;
  result["wire_bytes_sent"] = stats.wire_bytes_sent;
  result["wire_bytes_received"] = stats.wire_bytes_received;
  result["link_bytes_sent"] = stats.link_bytes_sent;
  result["nonfinite_elems"] = stats.nonfinite_elems;
  result["copy_seconds"] = stats.copy_seconds;
  result["reduce_seconds"] = stats.reduce_seconds;
  result["wait_seconds"] = stats.wait_seconds;
  result["wire_seconds"] = stats.wire_seconds;
  result["decode_seconds"] = stats.decode_seconds;
  result["total_seconds"] = stats.total_seconds;
  result["compressed_since"] = stats.compressed_since;
  result["residual_norm"] = stats.residual_norm;
  result["error_ratio"] = stats.error_ratio;
  result["loss_scale"] = stats.loss_scale;
  result["skipped_steps"] = stats.skipped_steps;
  result["sidecar_returns"] = stats.sidecar_returns;
  result["workers"] = stats.workers;
  return result;
}

py::bytes SaveCodecState(Session& session) {
  std::string state;
  absl::Status status;
  {
    py::gil_scoped_release release;
    status = session.SaveCodecState([&state](std::span<const std::byte> bytes) {
      state.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
  }
  ThrowIfError(status);
  return py::bytes(state);
}

void LoadCodecState(Session& session, const py::bytes& state) {
  const std::string_view text = state;
  absl::Status status;
  {
    py::gil_scoped_release release;
    status = session.LoadCodecState(std::as_bytes(std::span(text)));
  }
  ThrowIfError(status);
}

std::string CudaProblem(int number) {
  return std::string(OpenCudaDevice(number).status().message());
}

std::optional<std::string> StatusText(const Session& session) {
  const absl::Status status = session.status();
  if (status.ok()) return std::nullopt;
  return std::string(status.message());
}

}  // namespace
}  // namespace thalweg

PYBIND11_MODULE(_C, m) {
  using thalweg::Session;
  const py::call_guard<py::gil_scoped_release> released;
  thalweg::ThrowIfError(thalweg::LimitCpuCapability(thalweg::GetEnv("THALWEG_CPU_CAPABILITY")));
  m.def("cpu_capability", &thalweg::CpuCapability);
  m.def("cuda_problem", &thalweg::CudaProblem, py::arg("number"));
  m.def("set_error", &thalweg::SetError, released, py::arg("future"), py::arg("text"));
  m.def("reducer_parameters", &thalweg::ParametersOf, py::arg("reducer"));
  m.def(
      "call_in_callback",
      [](const py::object& function, const py::args& args, const py::kwargs& named) {
        const thalweg::Completions::InCallback here;
        return function(*args, **named);
      },
      py::arg("function"));
  m.def("scale_to_joined", &thalweg::ScaleToJoined, py::call_guard<py::gil_scoped_release>(),
        py::arg("reducer"), py::arg("gradient"));
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init(&thalweg::Connect), py::kw_only(), py::arg("sidecar_path"), py::arg("job"),
           py::arg("rank"), py::arg("world_size"), py::arg("node"), py::arg("num_nodes"),
           py::arg("node_name"), py::arg("local_rank"), py::arg("local_size"), py::arg("codec"),
           py::arg("chunk_bytes"), py::arg("timeout"), py::arg("step_timeout") = py::none(),
           py::arg("cuda_device") = py::none(), py::arg("shards") = std::vector<std::string>(),
           py::arg("hosts") = std::vector<int>(), py::arg("secret") = "", py::arg("min_nodes") = 0)
      .def("attach", &thalweg::Attach, py::arg("reducer"), py::arg("named_parameters"))
      .def("save_codec_state", &thalweg::SaveCodecState)
      .def("load_codec_state", &thalweg::LoadCodecState, py::arg("state"))
      .def("set_settings", &thalweg::SetSettings, py::arg("number"), py::arg("groups"),
           py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("max_grad_norm") = 0.0,
           py::arg("grad_squares") = 0.0, py::arg("measures") = false,
           py::arg("waits_for_all") = false, py::arg("gives_nothing") = false)
      .def("snapshots", &thalweg::ListSnapshots, released)
      .def("take_snapshot", &thalweg::TakeSnapshot, released, py::arg("branch"), py::arg("step"))
      .def("restore_snapshot", &thalweg::RestoreSnapshot, released, py::arg("branch"),
           py::arg("step"))
      .def("stats", &thalweg::Stats)
      .def("note_precision", &Session::NotePrecision, py::call_guard<py::gil_scoped_release>(),
           py::arg("loss_scale"), py::arg("skipped_steps"))
      .def("path", [](const Session& session) { return Name(session.stats().path); })
      .def("num_shards", [](const Session& session) { return session.stats().num_shards; })
      .def("placement", [](const Session& session) { return session.stats().placement; })
      .def("lost_nodes", [](const Session& session) { return session.stats().lost_nodes; })
      .def("status", &thalweg::StatusText)
      .def("has_lost_weights",
           [](const Session& session) { return absl::IsDataLoss(session.status()); })
      .def("close", &Session::Close, released)
      .def("abort", [](Session& session) { session.Abort("it has aborted the job"); }, released);
  m.def("cancel_connects", &thalweg::CancelConnects);
  py::class_<thalweg::ShardOffer>(m, "ShardOffer")
      .def(py::init(&thalweg::AskForShard), py::kw_only(), py::arg("sidecar_path"), py::arg("job"),
           py::arg("secret"), py::arg("timeout"))
      .def_property_readonly("address", &thalweg::ShardOffer::address)
      .def_property_readonly("aggregators", &thalweg::ShardOffer::aggregators)
      .def("close", &thalweg::ShardOffer::Close);
  py::class_<thalweg::DdpHook>(m, "DdpHook")
      .def(py::init(&thalweg::MakeInnerHook), py::arg("session"), py::arg("named_parameters"))
      .def("run", &thalweg::RunHook, py::arg("bucket"));
  // Its base class is torch's, which must be known by now.
  py::module_::import("torch._C._distributed_c10d");
  using thalweg::ProcessGroup;
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>> group(m,
                                                                                  "ProcessGroup");
  group
      .def(py::init(&thalweg::MakeProcessGroup), py::arg("session"), py::kw_only(),
           py::arg("number"), py::arg("rank"), py::arg("nodes"), py::arg("name"),
           py::arg("timeout"), py::arg("store") = c10::intrusive_ptr<c10d::Store>())
      .def_property_readonly("options", &ProcessGroup::options)
      .def("make_part", &thalweg::MakePart, py::call_guard<py::gil_scoped_release>(), py::kw_only(),
           py::arg("store"), py::arg("ranks"), py::arg("name"), py::arg("timeout"))
      .def("at_shutdown", &ProcessGroup::AtShutdown, py::arg("listener"))
      // new_group() calls it on ranks that are not in the group, where a device is bound.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object& /*device*/) {});
  // split_group() gives a part's back end a copy of the whole's.
  py::class_<ProcessGroup::Options, c10d::Backend::Options,
             c10::intrusive_ptr<ProcessGroup::Options>>(group, "Options")
      .def("__deepcopy__", [](const ProcessGroup::Options& options, const py::dict&) {
        return c10::make_intrusive<ProcessGroup::Options>(options);
      });
  using thalweg::Int8Blocks;
  py::class_<Int8Blocks>(m, "Int8Blocks")
      .def(py::init<const std::vector<std::pair<int64_t, int64_t>>&>(), py::arg("tensors"))
      .def("encode", &Int8Blocks::Encode, py::call_guard<py::gil_scoped_release>(), py::arg("rows"),
           py::arg("residual").none(true), py::arg("bytes"))
      .def("decode", &Int8Blocks::Decode, released, py::arg("bytes"), py::arg("rows"));
  thalweg::DefineServed(m);
  thalweg::DefineOptim(m);
  thalweg::DefineSnapshots(m);
  thalweg::DefineDeviceOptim(m);
}
