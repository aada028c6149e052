#include "server/shards/returning_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/testing/test_patience.h"

namespace thalweg::returning_shard_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr BucketId kBucket{1, 0, 0};

TimePoint Soon() { return Now() + kTestPatience; }

// The shard writes down what it hears, as words that begin with the number of the membership. Set
// the answers before they are asked for, or within on_join.
class ForgetfulShard : public Shard {
 public:
  absl::StatusOr<LinkSpeed> MeasureLink(uint32_t, TimePoint, const std::stop_token&) override {
    return LinkSpeed{};
  }
  absl::StatusOr<std::unique_ptr<Member>> Join(const JoinRequest& request,
                                               std::shared_ptr<MemberEvents> events,
                                               TimePoint) override {
    if (on_join) on_join();
    MutexLock lock(mutex_);
    joins_.push_back(request);
    changed_.NotifyAll();
    if (!refusal.ok()) return refusal;
    sink_ = std::move(events);
    Terms terms{1, kMinChunkBytes, 4};
    terms.resumed = request.resume.has_value() && resumes;
    terms.wanted = wanted;
    return std::make_unique<Membership>(*this, ++number_, std::move(terms));
  }

  // Restarts the shard; the stream tells the node, unless it is silent.
  void Restart(bool silently = false) {
    const auto sink = Forget();
    if (!silently) sink->OnFailed(absl::NotFoundError("no such membership"));
  }
  std::shared_ptr<MemberEvents> Forget() {
    MutexLock lock(mutex_);
    forgotten_ = number_;
    return sink_;
  }
  std::shared_ptr<MemberEvents> sink() {
    MutexLock lock(mutex_);
    return sink_;
  }
  void Answer(uint32_t chunk, uint64_t round) { sink()->OnResult(ResultOf(chunk, round)); }
  static RoundResult ResultOf(uint32_t chunk, uint64_t round) {
    return {{kBucket, chunk, round}, 1, WireFormat::kFloat32, 1, 2, 0, Payload()};
  }

  // Waits for as many calls.
  std::vector<std::string> WaitForCalls(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Soon(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return calls_.size() >= count;
    });
    return calls_;
  }
  std::vector<JoinRequest> WaitForJoins(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Soon(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return joins_.size() >= count;
    });
    return joins_;
  }
  std::vector<int> WaitForLeaves(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Soon(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return left_.size() >= count;
    });
    return left_;
  }

  std::function<void()> on_join;  // this and the next are called without a lock
  std::function<void(int number)> on_contribute;
  absl::Status refusal;
  bool resumes = true;
  std::vector<BucketRounds> wanted;

 private:
  class Membership : public Member {
   public:
    Membership(ForgetfulShard& shard, int number, Terms terms)
        : shard_(shard), number_(number), terms_(std::move(terms)) {}
    ~Membership() override { Leave(absl::OkStatus()); }

    const Terms& terms() const override { return terms_; }
    absl::Status Register(const BucketAnnouncement& bucket, TimePoint) override {
      return Note(absl::StrCat("register ", ToString(bucket.id)));
    }
    absl::Status MakeGroup(const Group& group, TimePoint) override {
      return Note(absl::StrCat("group ", group.id));
    }
    absl::Status Contribute(Contribution contribution) override {
      const RoundId& id = contribution.id;
      if (shard_.on_contribute) shard_.on_contribute(number_);
      return Note(absl::StrCat("contribute ", id.chunk, " round ", id.round));
    }
    absl::Status Supply(RoundResult result) override {
      return Note(absl::StrCat("supply ", result.id.chunk, " round ", result.id.round));
    }
    absl::StatusOr<std::vector<float>> ReadResidual(BucketId, uint32_t, TimePoint) override {
      const absl::Status status = Note("read");
      if (!status.ok()) return status;
      return std::vector<float>{1};
    }
    absl::Status WriteResidual(BucketId, uint32_t, std::span<const float>, TimePoint) override {
      return Note("write");
    }
    absl::Status SetSettings(uint64_t number, const UpdateStep&, TimePoint) override {
      return Note(absl::StrCat("settings ", number));
    }
    absl::StatusOr<WeightsSlice> ReadWeights(BucketId, uint32_t, uint32_t, TimePoint) override {
      const absl::Status status = Note("read weights");
      if (!status.ok()) return status;
      return WeightsSlice{{2}, 3};
    }
    absl::Status WriteWeights(BucketId, uint32_t, uint32_t, WeightsSlice, TimePoint) override {
      return Note("write weights");
    }
    absl::StatusOr<SnapshotReport> Snapshots(const SnapshotCall&, TimePoint) override {
      const absl::Status status = Note("snapshots");
      if (!status.ok()) return status;
      return SnapshotReport{};
    }
    absl::StatusOr<Pulse> Heartbeat(TimePoint) override {
      MutexLock lock(shard_.mutex_);
      if (number_ <= shard_.forgotten_) return absl::NotFoundError("no such membership");
      return Pulse{{"a boot", 1}, {}};
    }
    void Leave(const absl::Status&) override {
      MutexLock lock(shard_.mutex_);
      if (std::exchange(has_left_, true)) return;
      shard_.left_.push_back(number_);
      shard_.changed_.NotifyAll();
    }

   private:
    absl::Status Note(const std::string& what) {
      MutexLock lock(shard_.mutex_);
      if (has_left_) return absl::FailedPreconditionError("the node has left");
      if (number_ <= shard_.forgotten_) return absl::NotFoundError("no such membership");
      shard_.calls_.push_back(absl::StrCat(number_, " ", what));
      shard_.changed_.NotifyAll();
      return absl::OkStatus();
    }

    ForgetfulShard& shard_;
    const int number_;
    const Terms terms_;
    bool has_left_ = false;
  };

  Mutex mutex_;
  CondVar changed_;
  int number_ ABSL_GUARDED_BY(mutex_) = 0;  // of the latest membership
  int forgotten_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<MemberEvents> sink_ ABSL_GUARDED_BY(mutex_);
  std::vector<JoinRequest> joins_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> left_ ABSL_GUARDED_BY(mutex_);
};

class NodeEnd : public MemberEvents {
 public:
  void OnResult(RoundResult result) override {
    MutexLock lock(mutex_);
    results_.push_back(result.id);
  }
  void OnFailed(absl::Status why) override {
    MutexLock lock(mutex_);
    failures_.push_back(std::move(why));
    changed_.NotifyAll();
  }
  std::vector<RoundId> results() {
    MutexLock lock(mutex_);
    return results_;
  }
  std::vector<absl::Status> WaitForFailures(size_t count) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(mutex_, Soon(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return failures_.size() >= count;
    });
    return failures_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<RoundId> results_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> failures_ ABSL_GUARDED_BY(mutex_);
};

class ReturningShardTest : public ::testing::Test {
 protected:
  void Start(Duration patience = kTestPatience) {
    node_.reset();  // it leaves the shard that it has joined, which an earlier call has made
    returning_ = std::make_unique<ReturningShard>(shard_, patience, metrics_);
    JoinRequest request;
    request.job = "job";
    request.shard = 3;
    auto member = returning_->Join(request, end_, Soon());
    ASSERT_TRUE(member.ok()) << member.status();
    node_ = *std::move(member);
    ASSERT_TRUE(Register().ok());
  }
  absl::Status Register() { return node_->Register({kBucket, {}}, Soon()); }
  absl::Status Contribute(uint32_t chunk, uint64_t round) {
    return node_->Contribute({{kBucket, chunk, round}, 1, WireFormat::kFloat32, 1, Payload()});
  }
  double KeptBytes() { return metrics_.GetGauge("thalweg_sidecar_kept_result_bytes", "").Value(); }

  MetricRegistry metrics_;
  std::shared_ptr<ForgetfulShard> shard_ = std::make_shared<ForgetfulShard>();
  std::shared_ptr<NodeEnd> end_ = std::make_shared<NodeEnd>();
  std::unique_ptr<ReturningShard> returning_;
  std::unique_ptr<Member> node_;
};

TEST_F(ReturningShardTest, RestartedShardGetsEverythingBack) {
  Start();
  ASSERT_TRUE(Contribute(0, 1).ok());
  ASSERT_TRUE(Contribute(1, 1).ok());
  shard_->Answer(0, 1);
  ASSERT_TRUE(Contribute(0, 2).ok());
  shard_->wanted = {{kBucket, {1}}};
  shard_->Restart();
  EXPECT_THAT(shard_->WaitForCalls(8),
              ElementsAre("1 register 1", "1 contribute 0 round 1", "1 contribute 1 round 1",
                          "1 contribute 0 round 2", "2 register 1", "2 supply 0 round 1",
                          "2 contribute 0 round 2", "2 contribute 1 round 1"));
  const auto joins = shard_->WaitForJoins(2);
  EXPECT_FALSE(joins[0].resume);
  ASSERT_TRUE(joins[1].resume);
  EXPECT_THAT(*joins[1].resume, ElementsAre(BucketRounds{kBucket, {1}}));
  EXPECT_EQ(joins[1].chunk_bytes, kMinChunkBytes);
  EXPECT_EQ(joins[1].window_chunks, 4u);
  EXPECT_THAT(shard_->WaitForLeaves(1), ElementsAre(1));
  shard_->Answer(1, 1);
  shard_->Answer(0, 2);
  EXPECT_THAT(end_->results(),
              ElementsAre(RoundId{kBucket, 0, 1}, RoundId{kBucket, 1, 1}, RoundId{kBucket, 0, 2}));
  EXPECT_THAT(end_->WaitForFailures(0), IsEmpty());
  EXPECT_TRUE(node_->Heartbeat(Soon()).ok());
  node_->Leave(absl::OkStatus());
  EXPECT_THAT(shard_->WaitForLeaves(2), ElementsAre(1, 2));
}

TEST_F(ReturningShardTest, ContributionInAMembershipThatEndsMeanwhileCountsInTheNextOne) {
  Start();
  shard_->on_contribute = [this](int number) {
    if (number > 1) return;
    shard_->Restart();
    EXPECT_THAT(shard_->WaitForLeaves(1), ElementsAre(1));
  };
  EXPECT_TRUE(Contribute(0, 1).ok());
  EXPECT_THAT(shard_->WaitForCalls(3),
              ElementsAre("1 register 1", "2 register 1", "2 contribute 0 round 1"));
  EXPECT_THAT(end_->WaitForFailures(0), IsEmpty());
}

TEST_F(ReturningShardTest, GroupsAreMadeAgainBeforeBuckets) {
  Start();
  ASSERT_TRUE(node_->MakeGroup({4, {{0, 1}}}, Soon()).ok());
  shard_->Restart();
  EXPECT_THAT(shard_->WaitForCalls(4),
              ElementsAre("1 register 1", "1 group 4", "2 group 4", "2 register 1"));
}

TEST_F(ReturningShardTest, LettersThatMayBeLostFailTheNodeSayingSo) {
  Start();
  Contribution letter{{LettersOf(0), 0, 1}, 1, WireFormat::kDenseUInt8, 0, Payload()};
  letter.collective = {Place::One(0), Place::One(1), Fold::kNone};
  ASSERT_TRUE(node_->Contribute(letter).ok());
  shard_->Restart();
  const auto failures = end_->WaitForFailures(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(std::string(failures[0].message()), HasSubstr("workers have sent to each other"));
}

TEST_F(ReturningShardTest, OpenOneShotRoundsFailTheNodeSayingSo) {
  Start();
  ASSERT_TRUE(node_->MakeGroup({4, {{0, 1}}}, Soon()).ok());
  Contribution share{{OneShotsOf(4), 0, 1}, 1, WireFormat::kFloat32, 1, Payload()};
  share.group = 4;
  ASSERT_TRUE(node_->Contribute(share).ok());
  shard_->Restart();
  const auto failures = end_->WaitForFailures(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(std::string(failures[0].message()),
              HasSubstr("1 one-shot rounds of collectives were open"));
}

TEST_F(ReturningShardTest, ResultOfAForgottenMembershipDoesNotCount) {
  Start();
  ASSERT_TRUE(Contribute(0, 1).ok());
  const auto old = shard_->sink();
  shard_->Restart();
  ASSERT_EQ(shard_->WaitForCalls(4).size(), 4u);
  old->OnResult(ForgetfulShard::ResultOf(0, 1));
  old->OnFailed(absl::AbortedError("late"));
  EXPECT_THAT(end_->results(), IsEmpty());
  shard_->Answer(0, 1);
  shard_->Answer(0, 1);  // a repetition
  EXPECT_THAT(end_->results(), ElementsAre(RoundId{kBucket, 0, 1}));
  EXPECT_THAT(end_->WaitForFailures(0), IsEmpty());
}

TEST_F(ReturningShardTest, CallsDuringTheReturnReachTheNewMembership) {
  Start();
  shard_->on_join = [&] {
    // While the node joins, its threads go on.
    EXPECT_TRUE(Contribute(5, 1).ok());
    EXPECT_TRUE(absl::IsUnavailable(node_->Heartbeat(Soon()).status()));
  };
  const auto sink = shard_->Forget();
  // The call is the first to learn of it, and waits for the stream to end.
  Thread caller("caller",
                [&] { EXPECT_EQ(*node_->ReadResidual(kBucket, 0, Soon()), std::vector{1.f}); });
  EXPECT_TRUE(absl::IsUnavailable(node_->Heartbeat(Soon()).status()));
  sink->OnFailed(absl::NotFoundError("no such membership"));
  caller.Join();
  EXPECT_TRUE(node_->WriteResidual(kBucket, 0, {}, Soon()).ok());
  EXPECT_THAT(shard_->WaitForCalls(5),
              ::testing::UnorderedElementsAre("1 register 1", "2 register 1",
                                              "2 contribute 5 round 1", "2 read", "2 write"));
}

TEST_F(ReturningShardTest, ShardMayBeRestartedAgainWhileTheNodeReturns) {
  Start();
  int joins = 0;
  shard_->on_join = [&] {
    // It is down for a moment, and is restarted once more after the node has joined.
    shard_->refusal =
        ++joins == 1 ? absl::UnavailableError("connection refused") : absl::OkStatus();
    if (joins == 3) shard_->on_join = nullptr;
  };
  shard_->Restart();
  ASSERT_EQ(shard_->WaitForCalls(2).size(), 2u);
  shard_->Restart();
  EXPECT_THAT(shard_->WaitForCalls(3), ElementsAre("1 register 1", "2 register 1", "3 register 1"));
  EXPECT_TRUE(Register().ok());
  EXPECT_THAT(end_->WaitForFailures(0), IsEmpty());
}

TEST_F(ReturningShardTest, ShardThatDoesNotComeBackFailsTheNodeInTime) {
  Start(milliseconds(250));
  shard_->refusal = absl::UnavailableError("connection refused");
  const TimePoint begin = Now();
  shard_->Restart();
  const auto failures = end_->WaitForFailures(1);
  EXPECT_GE(Now() - begin, milliseconds(250));
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0], absl::UnavailableError("connection refused; aggregator shard 3 has been "
                                                "restarted, and the job cannot go on there"));
  EXPECT_EQ(Contribute(0, 1), failures[0]);
  EXPECT_EQ(Register(), failures[0]);
}

TEST_F(ReturningShardTest, ShardThatHasKeptWeightsLosesThemWhenItDoesNotComeBack) {
  for (const bool is_restarted : {true, false}) {
    end_ = std::make_shared<NodeEnd>();
    shard_ = std::make_shared<ForgetfulShard>();
    Start(milliseconds(250));
    BucketAnnouncement bucket{kBucket, {}};
    bucket.update = UpdateRule{};
    ASSERT_TRUE(node_->Register(bucket, Soon()).ok());
    shard_->refusal = absl::UnavailableError("connection refused");
    if (is_restarted) {
      shard_->Restart();
    } else {
      shard_->sink()->OnFailed(absl::UnavailableError("lost the connection"));
    }
    const auto failures = end_->WaitForFailures(1);
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_TRUE(absl::IsDataLoss(failures[0])) << failures[0];
  }
  // A job that has failed has lost no shard.
  end_ = std::make_shared<NodeEnd>();
  shard_ = std::make_shared<ForgetfulShard>();
  Start();
  const absl::Status why = absl::UnavailableError("job 'job': node 1 has sent nothing for 15 s");
  shard_->sink()->OnFailed(why);
  EXPECT_THAT(end_->WaitForFailures(1), ElementsAre(why));
}

TEST_F(ReturningShardTest, RefusalFailsTheNodeAtOnce) {
  Start();
  shard_->refusal = absl::InvalidArgumentError("node 1 says otherwise");
  shard_->Restart();
  const auto failures = end_->WaitForFailures(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(failures[0]));
}

TEST_F(ReturningShardTest, ShardOfAnEarlierReleaseIsLeftAgain) {
  Start();
  shard_->resumes = false;
  shard_->Restart();
  const auto failures = end_->WaitForFailures(1);
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_THAT(std::string(failures[0].message()), HasSubstr("its release cannot resume jobs"));
  EXPECT_THAT(shard_->WaitForLeaves(2), ElementsAre(1, 2));
}

TEST_F(ReturningShardTest, OtherFailuresArePassedOnAtOnce) {
  Start();
  const absl::Status why = absl::AbortedError("job 'job': node 1 is gone");
  shard_->sink()->OnFailed(why);
  EXPECT_THAT(end_->WaitForFailures(1), ElementsAre(why));
  EXPECT_EQ(Contribute(0, 1), why);
  EXPECT_EQ(shard_->WaitForJoins(0).size(), 1u);
}

TEST_F(ReturningShardTest, NodeThatLeavesWhileItReturnsLeavesTheNewMembershipToo) {
  Start();
  ASSERT_TRUE(Contribute(0, 1).ok());
  shard_->on_join = [&] { node_->Leave(absl::CancelledError("the job has ended")); };
  shard_->Restart();
  EXPECT_THAT(shard_->WaitForLeaves(2), ElementsAre(1, 2));
  node_.reset();
  returning_.reset();
  EXPECT_THAT(end_->WaitForFailures(0), IsEmpty());
  EXPECT_EQ(shard_->WaitForCalls(0).size(), 2u);  // none of the new membership
}

TEST_F(ReturningShardTest, BytesOfKeptResultsAreShownUntilTheNodeLeaves) {
  Start();
  ASSERT_TRUE(Contribute(0, 1).ok());
  const auto bytes = std::make_shared<const std::string>(100, 'x');
  RoundResult result = ForgetfulShard::ResultOf(0, 1);
  result.payload = Payload(std::as_bytes(std::span(*bytes)), bytes);
  shard_->sink()->OnResult(std::move(result));
  EXPECT_EQ(KeptBytes(), 100);
  EXPECT_EQ(bytes.use_count(), 2);
  node_->Leave(absl::OkStatus());
  EXPECT_EQ(KeptBytes(), 0);
  EXPECT_EQ(bytes.use_count(), 1);
}

}  // namespace
}  // namespace thalweg::returning_shard_test
