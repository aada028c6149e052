// A back end of torch.distributed in one file: ranks exchange tensors through the group's store.
// docs/c10d.md explains it. It is slow, and has two collectives: the rest is refused by name,
// because c10d::Backend does so where nothing is overridden.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace store_demo {

using Tensors = std::vector<at::Tensor>;

// What a call returns. The base class waits: it needs finish() and a future only.
class StoreWork : public c10d::Work {
 public:
  StoreWork(int rank, c10d::OpType type, Tensors outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  // First whoever is in wait() may go on, then callbacks run, on the calling thread.
  void Complete() {
    finish();
    future_->markCompleted(c10::IValue(outputs_));
  }
  void Fail(const std::exception_ptr& error) {
    finish(error);
    future_->setError(error);
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Calls only queue what is to be done; one thread does it in their order, which must be the same on
// all ranks.
class StoreBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // The thread has a connection of its own to the store: while it waits there, others may use
  // `store`.
  StoreBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout)
      : Backend(rank, size), store_(store->clone()) {
    store_->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout)));
    thread_ = std::thread([this] { Loop(); });
  }
  ~StoreBackend() override { shutdown(); }

  const std::string getBackendName() const override { return "store_demo"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    at::Tensor tensor = Only(tensors);
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "store_demo: allreduce only sums");
    return Begin(c10d::OpType::ALLREDUCE, tensors, [this, tensor](const std::string& key) {
      Give(key, getRank(), tensor);
      at::Tensor sum = Get(key, 0, tensor);
      // All ranks add in the same order: they get the same bits.
      for (int rank = 1; rank < getSize(); ++rank) sum += Get(key, rank, tensor);
      tensor.copy_(sum);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    at::Tensor tensor = Only(tensors);
    const auto root = static_cast<int>(options.rootRank);
    return Begin(c10d::OpType::BROADCAST, tensors, [this, tensor, root](const std::string& key) {
      if (root == getRank()) {
        Give(key, root, tensor);
      } else {
        tensor.copy_(Get(key, root, tensor));
      }
    });
  }

  // Ends the thread after what it is doing. May be called again.
  void shutdown() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Call {
    c10::intrusive_ptr<StoreWork> work;
    std::function<void(const std::string& key)> run;
  };

  static at::Tensor Only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "store_demo takes one tensor, got ", tensors.size());
    TORCH_CHECK(tensors[0].is_cpu() && !tensors[0].is_sparse(), "store_demo: expected the CPU's");
    return tensors[0];
  }

  WorkPtr Begin(c10d::OpType type, const Tensors& outputs,
                std::function<void(const std::string& key)> run) {
    auto work = c10::make_intrusive<StoreWork>(getRank(), type, outputs);
    {
      std::lock_guard lock(mutex_);
      TORCH_CHECK(!stopping_, "store_demo: the process group was destroyed");
      calls_.push_back({work, std::move(run)});
    }
    changed_.notify_all();
    return work;
  }

  void Loop() {
    for (uint64_t number = 0;; ++number) {
      Call call;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || !calls_.empty(); });
        if (calls_.empty()) return;
        call = std::move(calls_.front());
        calls_.pop_front();
      }
      try {
        const std::string key = "store_demo/" + std::to_string(number);
        call.run(key);
        CleanUp(key);
        call.work->Complete();
      } catch (...) {  // such as the store's timeout: it reaches whoever waits
        call.work->Fail(std::current_exception());
      }
    }
  }

  void Give(const std::string& key, int rank, const at::Tensor& tensor) {
    const at::Tensor dense = tensor.contiguous();
    const auto* bytes = static_cast<const uint8_t*>(dense.const_data_ptr());
    store_->set(NameOf(key, rank), std::vector<uint8_t>(bytes, bytes + dense.nbytes()));
  }

  // Waits for what a rank gives, which must have the type and shape of `like`.
  at::Tensor Get(const std::string& key, int rank, const at::Tensor& like) {
    const std::vector<uint8_t> bytes = store_->get(NameOf(key, rank));
    at::Tensor tensor = at::empty(like.sizes(), like.options());
    TORCH_CHECK(bytes.size() == tensor.nbytes(), "store_demo: rank ", rank, " gave ", bytes.size(),
                " bytes, expected ", tensor.nbytes());
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return tensor;
  }

  // Deletes what has been given, when all ranks have read it.
  void CleanUp(const std::string& key) {
    if (store_->add(key, 1) < getSize()) return;
    for (int rank = 0; rank < getSize(); ++rank) store_->deleteKey(NameOf(key, rank));
    store_->deleteKey(key);
  }

  static std::string NameOf(const std::string& key, int rank) {
    return key + "/" + std::to_string(rank);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;  // guarded by mutex_, as is the next
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace store_demo

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using store_demo::StoreBackend;
  py::module_::import("torch");  // knows c10d's classes
  py::class_<StoreBackend, c10d::Backend, c10::intrusive_ptr<StoreBackend>>(m, "StoreBackend")
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int, double>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("timeout"));
}
