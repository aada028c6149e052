// These tests check NcclGroup's calls into NCCL, which a recorder replaces.
#include "core/device/nccl_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/mutex.h"
#include "core/base/thread.h"
#include "core/device/fake_runtime.h"

namespace thalweg::nccl_group_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

constexpr Duration kPatience = std::chrono::seconds(20);
// For waits that must time out, in groups that connect within it.
constexpr Duration kShort = std::chrono::seconds(3);

// A Recorder replaces NCCL for two GPUs. It records calls as they begin; one kind of call can be
// made to fail or to block.
class Recorder {
 public:
  static Recorder& Get() {
    static auto* const recorder = new Recorder;  // abandoned threads keep using it
    return *recorder;
  }
  // Prepares the next test, when nothing is blocked any more.
  void Reset() {
    Unblock();
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Now() + kPatience,
                       [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return blocked_ == 0; });
    calls_.clear();
    failing_.clear();
    async_error_ = kNcclSuccess;
  }
  void FailAt(std::string call, int error) {
    MutexLock lock(mutex_);
    failing_ = std::move(call);
    error_ = error;
  }
  void MeetAsyncError(int error) {
    MutexLock lock(mutex_);
    async_error_ = error;
  }
  void BlockAt(std::string call) {
    MutexLock lock(mutex_);
    blocking_ = std::move(call);
  }
  void Unblock() {
    MutexLock lock(mutex_);
    blocking_.clear();
    changed_.NotifyAll();
  }
  bool WaitFor(const std::string& call, int count = 1) {
    MutexLock lock(mutex_);
    return changed_.WaitUntil(mutex_, Now() + kPatience,
                              [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                return std::count(calls_.begin(), calls_.end(), call) >= count;
                              });
  }
  std::vector<std::string> calls() {
    MutexLock lock(mutex_);
    return calls_;
  }
  int async_error() {
    MutexLock lock(mutex_);
    return async_error_;
  }
  int Call(const std::string& call) {
    MutexLock lock(mutex_);
    calls_.push_back(call);
    changed_.NotifyAll();
    ++blocked_;
    changed_.WaitUntil(mutex_, Now() + kPatience,
                       [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return blocking_ != call; });
    --blocked_;
    changed_.NotifyAll();
    return call == failing_ ? error_ : kNcclSuccess;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  std::string failing_ ABSL_GUARDED_BY(mutex_);
  int error_ ABSL_GUARDED_BY(mutex_) = 0;
  int async_error_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string blocking_ ABSL_GUARDED_BY(mutex_);
  int blocked_ ABSL_GUARDED_BY(mutex_) = 0;
};

uintptr_t Number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

NcclApi Api() {
  NcclApi api;
  api.comm_init_all = [](NcclComm* comms, int count, const int* devices) {
    for (int i = 0; i < count; ++i) {
      comms[i] = reinterpret_cast<NcclComm>(uintptr_t{100} + static_cast<uintptr_t>(devices[i]));
    }
    return Recorder::Get().Call("init");
  };
  api.comm_destroy = [](NcclComm comm) {
    return Recorder::Get().Call(absl::StrCat("destroy ", Number(comm)));
  };
  api.comm_abort = [](NcclComm comm) {
    return Recorder::Get().Call(absl::StrCat("abort ", Number(comm)));
  };
  api.comm_get_async_error = [](NcclComm comm, int* error) {
    *error = Number(comm) == 105 ? Recorder::Get().async_error() : kNcclSuccess;
    return kNcclSuccess;
  };
  api.group_start = [] { return Recorder::Get().Call("start"); };
  api.group_end = [] { return Recorder::Get().Call("end"); };
  api.reduce = [](const void* send, void* receive, size_t elems, int type, int operation, int root,
                  NcclComm comm, DeviceStream stream) {
    return Recorder::Get().Call(absl::StrCat(
        "reduce ", Number(send), ">", Number(receive), " elems ", elems, " type ", type, " op ",
        operation, " root ", root, " on ", Number(comm), " stream ", Number(stream)));
  };
  api.broadcast = [](const void* send, void* receive, size_t elems, int type, int root,
                     NcclComm comm, DeviceStream stream) {
    return Recorder::Get().Call(absl::StrCat("broadcast ", Number(send), ">", Number(receive),
                                             " elems ", elems, " type ", type, " root ", root,
                                             " on ", Number(comm), " stream ", Number(stream)));
  };
  api.get_error_string = [](int error) { return error == 3 ? "internal error" : "other error"; };
  api.get_last_error = [](NcclComm) { return "what went wrong"; };
  return api;
}

class NcclGroupTest : public ::testing::Test {
 protected:
  NcclGroupTest() { Recorder::Get().Reset(); }
  ~NcclGroupTest() override {
    group_ = nullptr;
    Recorder::Get().Reset();
  }
  absl::Status Open(Duration patience = kPatience) {
    auto group = NcclGroup::Create(
        Api(), {std::make_shared<FakeRuntime>(true, 3), std::make_shared<FakeRuntime>(true, 5)},
        patience);
    if (group.ok()) group_ = *std::move(group);
    return group.status();
  }
  static DeviceGroup::Member MemberAt(uintptr_t memory, uintptr_t stream) {
    return {reinterpret_cast<void*>(memory), reinterpret_cast<DeviceStream>(stream)};
  }

  const std::vector<DeviceGroup::Member> members_ = {MemberAt(1000, 1), MemberAt(2000, 2)};
  std::shared_ptr<DeviceGroup> group_;
};

TEST_F(NcclGroupTest, ReduceIsOneOperationIntoTheRootsMemoryAlone) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(group_->Reduce(members_, 1, DType::kBFloat16, 7).ok());
  EXPECT_THAT(
      Recorder::Get().calls(),
      ElementsAre("init", "start", "reduce 1000>0 elems 7 type 9 op 0 root 1 on 103 stream 1",
                  "reduce 2000>2000 elems 7 type 9 op 0 root 1 on 105 stream 2", "end"));
}

TEST_F(NcclGroupTest, TypesAreThoseOfNccl) {
  ASSERT_TRUE(Open().ok());
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    ASSERT_TRUE(group_->Reduce(members_, 0, dtype, 1).ok());
  }
  EXPECT_THAT(Recorder::Get().calls(),
              IsSupersetOf({HasSubstr("type 6"), HasSubstr("type 7"), HasSubstr("type 8")}));
}

TEST_F(NcclGroupTest, BroadcastIsOneOperationOnBytes) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(group_->Broadcast(members_, 0, 12).ok());
  EXPECT_THAT(
      Recorder::Get().calls(),
      ElementsAre("init", "start", "broadcast 1000>1000 elems 12 type 1 root 0 on 103 stream 1",
                  "broadcast 2000>2000 elems 12 type 1 root 0 on 105 stream 2", "end"));
}

TEST_F(NcclGroupTest, CallsOfSeveralThreadsComeOneAfterTheOther) {
  ASSERT_TRUE(Open().ok());
  constexpr int kThreads = 4;
  constexpr int kCalls = 50;
  {
    std::vector<Thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back("caller", [this] {
        for (int i = 0; i < kCalls; ++i) EXPECT_TRUE(group_->Broadcast(members_, 0, 1).ok());
      });
    }
  }
  const auto calls = Recorder::Get().calls();
  ASSERT_EQ(calls.size(), 1u + kThreads * kCalls * 4);
  for (size_t i = 1; i < calls.size(); i += 4) {
    ASSERT_EQ(calls[i], "start");
    ASSERT_THAT(calls[i + 1], HasSubstr("on 103"));
    ASSERT_THAT(calls[i + 2], HasSubstr("on 105"));
    ASSERT_EQ(calls[i + 3], "end");
  }
}

TEST_F(NcclGroupTest, HealthyGroupIsDestroyedAsOneOperation) {
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(group_->Check().ok());
  group_ = nullptr;
  EXPECT_THAT(Recorder::Get().calls(),
              ElementsAre("init", "start", "destroy 103", "destroy 105", "end"));
}

TEST_F(NcclGroupTest, CallThatFailsIsEndedAndTheGroupAborted) {
  ASSERT_TRUE(Open().ok());
  Recorder::Get().FailAt("broadcast 1000>1000 elems 1 type 1 root 0 on 103 stream 1", 3);
  const absl::Status status = group_->Broadcast(members_, 0, 1);
  EXPECT_EQ(status.message(), "NCCL: ncclBroadcast: internal error (what went wrong)");
  EXPECT_EQ(group_->Reduce(members_, 0, DType::kFloat32, 1), status);
  EXPECT_EQ(group_->Check(), status);
  group_ = nullptr;
  EXPECT_THAT(Recorder::Get().calls(), ElementsAre("init", "start", HasSubstr("broadcast"), "end",
                                                   "start", "abort 103", "abort 105", "end"));
}

TEST_F(NcclGroupTest, ErrorOfWhatIsQueuedIsFoundAndStays) {
  ASSERT_TRUE(Open().ok());
  Recorder::Get().MeetAsyncError(kNcclInProgress - 1);
  const absl::Status status = group_->Check();
  EXPECT_EQ(status.message(), "NCCL: GPU 5: other error (what went wrong)");
  Recorder::Get().MeetAsyncError(kNcclSuccess);
  EXPECT_EQ(group_->Check(), status);
  EXPECT_THAT(Recorder::Get().calls(), ElementsAre("init"));  // its users must be told first
  group_->Abort();
  EXPECT_TRUE(Recorder::Get().WaitFor("abort 105"));
  group_ = nullptr;
  EXPECT_THAT(Recorder::Get().calls(), Not(Contains(HasSubstr("destroy"))));
}

TEST_F(NcclGroupTest, FirstErrorStaysAndOnlyThenTheGroupIsAborted) {
  ASSERT_TRUE(Open().ok());
  group_->Abort();
  EXPECT_TRUE(group_->Check().ok());
  group_->Fail(absl::DeadlineExceededError("first"));
  group_->Fail(absl::DeadlineExceededError("second"));
  EXPECT_EQ(group_->Check().message(), "first");
  group_->Abort();
  group_->Abort();
  group_ = nullptr;
  const auto calls = Recorder::Get().calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "abort 103"), 1);
}

TEST_F(NcclGroupTest, CheckAndAbortDoNotWaitForACallThatBlocks) {
  ASSERT_TRUE(Open().ok());
  Recorder::Get().BlockAt("end");
  {
    Thread caller("caller",
                  [this] { EXPECT_EQ(group_->Broadcast(members_, 0, 1).message(), "enough"); });
    EXPECT_TRUE(Recorder::Get().WaitFor("end"));
    EXPECT_TRUE(group_->Check().ok());
    group_->Fail(absl::DeadlineExceededError("enough"));
    group_->Abort();
    EXPECT_EQ(group_->Check().message(), "enough");
    EXPECT_THAT(Recorder::Get().calls(),
                Not(Contains(HasSubstr("abort"))));  // its members are in use
    Recorder::Get().Unblock();
  }
  EXPECT_TRUE(Recorder::Get().WaitFor("abort 105"));
}

TEST_F(NcclGroupTest, CallBehindOneThatNeverReturnsFails) {
  ASSERT_TRUE(Open(kShort).ok());
  Recorder::Get().BlockAt("end");
  Thread caller("caller", [this] { group_->Broadcast(members_, 0, 1).IgnoreError(); });
  EXPECT_TRUE(Recorder::Get().WaitFor("end"));
  EXPECT_THAT(group_->Reduce(members_, 0, DType::kFloat32, 1).message(),
              HasSubstr("has not returned for 3 s"));
  Recorder::Get().Unblock();
}

TEST_F(NcclGroupTest, TakingApartThatDoesNotEndIsLeftBehind) {
  ASSERT_TRUE(Open(kShort).ok());
  Recorder::Get().BlockAt("destroy 103");
  group_ = nullptr;  // would not return
  EXPECT_TRUE(Recorder::Get().WaitFor("destroy 103"));
  EXPECT_THAT(Recorder::Get().calls(), ElementsAre("init", "start", "destroy 103"));
  Recorder::Get().Unblock();
  EXPECT_TRUE(Recorder::Get().WaitFor("end"));  // of the abandoned thread
}

TEST_F(NcclGroupTest, ConnectingThatFailsOrDoesNotEndIsAnError) {
  Recorder::Get().FailAt("init", kNcclInProgress);
  EXPECT_THAT(Open().message(), AllOf(HasSubstr("ncclCommInitAll: other error"),
                                      HasSubstr("unset NCCL_COMM_BLOCKING")));
  Recorder::Get().BlockAt("init");
  EXPECT_EQ(Open(kShort).message(),
            "NCCL did not connect 2 GPUs within 3 s; NCCL_DEBUG=INFO says what it does");
  EXPECT_TRUE(Recorder::Get().WaitFor("init", 2));  // of the abandoned thread
  EXPECT_THAT(Recorder::Get().calls(), ElementsAre("init", "init"));
}

TEST_F(NcclGroupTest, NcclItselfSaysWhyItCannotConnect) {
  const std::string path = THALWEG_TEST_NCCL;
  if (path.empty()) GTEST_SKIP() << "no libnccl.so.2 in the Python environment of this build";
  if (CountCudaDevices() > 0) GTEST_SKIP() << "there are GPUs, which it would connect";
  const auto api = LoadNccl(path);
  ASSERT_TRUE(api.ok()) << api.status();
  const auto group = NcclGroup::Create(
      *api, {std::make_shared<FakeRuntime>(true, 0), std::make_shared<FakeRuntime>(true, 1)},
      kPatience);
  EXPECT_THAT(group.status().message(), HasSubstr("NCCL: ncclCommInitAll: unhandled cuda error"));
}

TEST_F(NcclGroupTest, CallForOtherMembersIsRefused) {
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(group_->Broadcast(std::span(members_).first(1), 0, 1).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(group_->Broadcast(members_, 2, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(group_->Check().ok());
}

}  // namespace
}  // namespace thalweg::nccl_group_test
