#include "client/core/completions.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <vector>

#include "core/base/testing/test_patience.h"

namespace thalweg::completions_test {
namespace {

TEST(CompletionsTest, CallsOfALaneComeInOrder) {
  std::vector<int> seen;
  {
    Completions completions;
    for (int i = 0; i < 100; ++i) completions.Add(0, [&seen, i] { seen.push_back(i); });
  }
  ASSERT_EQ(seen.size(), 100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[i], i);
}

TEST(CompletionsTest, CallMayWaitForWhatItBeginsAndTheNextOnesWaitForIt) {
  std::vector<int> seen;
  {
    Completions completions;
    completions.Add(0, [&] {
      std::promise<void> outer;
      completions.Add(completions.LaneHere(), [&] {
        std::promise<void> inner;
        completions.Add(completions.LaneHere(), [&] {
          seen.push_back(completions.LaneHere());
          inner.set_value();
        });
        inner.get_future().get();
        seen.push_back(completions.LaneHere());
        outer.set_value();
      });
      outer.get_future().get();
      seen.push_back(completions.LaneHere());
    });
    std::promise<void> last;
    completions.Add(0, [&] {
      seen.push_back(100);
      last.set_value();
    });
    EXPECT_EQ(completions.LaneHere(), 0);
    last.get_future().get();  // after Close calls would be made at once
  }
  EXPECT_EQ(seen, (std::vector<int>{3, 2, 1, 100}));
}

TEST(CompletionsTest, NewsOvertakesACallThatIsRunning) {
  std::promise<void> news;
  std::promise<void> running;
  std::vector<int> seen;
  {
    Completions completions;
    completions.Add(0, [&] {
      running.set_value();
      news.get_future().get();
      seen.push_back(2);
    });
    running.get_future().get();
    completions.Add(0, [&] { seen.push_back(1); });
    completions.Overtake();
    completions.Add(0, [&] { news.set_value(); });
  }
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
}

TEST(CompletionsTest, CallIsMadeAtOnceAfterClose) {
  Completions completions;
  completions.Close();
  bool is_called = false;
  completions.Add(0, [&] { is_called = true; });
  EXPECT_TRUE(is_called);
}

TEST(CompletionsTest, CallbackThatItsAdderCallsIsInALaneLikeAnyOther) {
  Completions completions;
  std::promise<int> lane;
  {
    const Completions::InCallback here;
    EXPECT_EQ(completions.LaneHere(), 1);
    completions.Add(0, [&] {
      const Completions::InCallback there;  // the lane's call itself
      const Completions::InCallback inner;
      lane.set_value(completions.LaneHere());
    });
    EXPECT_EQ(lane.get_future().get(), 2);
  }
  EXPECT_EQ(completions.LaneHere(), 0);
}

TEST(CompletionsTest, HiddenStagesHaveLanesOfTheirOwnThatCallbacksDoNotHoldUp) {
  std::vector<int> lanes;
  std::promise<void> sum;
  {
    Completions completions;
    std::promise<void> callback;
    completions.Add(0, [&] { callback.get_future().get(); });
    int first = 0;
    {
      const Completions::Hidden here;
      first = completions.LaneHere();
    }
    completions.Add(first, [&] {
      lanes = {first, completions.LaneHere()};
      completions.Add(completions.LaneHere(), [&] { sum.set_value(); });
    });
    sum.get_future().get();  // though the callback is still waiting
    callback.set_value();
    const Completions::InCallback there;
    const Completions::Hidden here;
    lanes.push_back(completions.LaneHere());
  }
  constexpr int kHidden = Completions::kHidden;
  EXPECT_EQ(lanes, (std::vector<int>{kHidden, 2 * kHidden, kHidden + 1}));
}

TEST(CompletionsTest, NewsOvertakeNoHiddenCallForWhichAnotherWaits) {
  std::promise<void> running, news, sum;
  std::atomic<bool> has_waited = false;
  {
    Completions completions;
    completions.Add(0, [&] {
      running.set_value();
      news.get_future().get();
    });
    running.get_future().get();
    completions.Add(0, [&] {
      sum.get_future().get();
      has_waited = true;
    });
    completions.Overtake();
    completions.Add(Completions::kHidden, [&] { sum.set_value(); });
    completions.Add(0, [&] { news.set_value(); });
  }
  EXPECT_TRUE(has_waited);
}

TEST(CompletionsTest, CallOfAnotherObjectsLaneIsACallbackToo) {
  Completions one;
  Completions other;
  std::promise<int> lane;
  one.Add(0, [&] { lane.set_value(other.LaneHere()); });
  EXPECT_EQ(lane.get_future().get(), 1);
}

TEST(CompletionsTest, CallThatWaitsForALaterOneOfItsLaneIsLeftBehind) {
  Completions completions;
  for (int round = 0; round < 3; ++round) {
    std::promise<void> waits, later;
    std::promise<int> lane;
    completions.Add(0, [&] {
      completions.StandInFor(1);  // which this thread does not serve
      completions.StandInFor(0);
      completions.StandInFor(0);
      waits.set_value();
      later.get_future().get();
      lane.set_value(completions.LaneHere());
    });
    waits.get_future().get();
    completions.Add(0, [&] { later.set_value(); });
    EXPECT_EQ(lane.get_future().get(), 1);
  }
}

TEST(CompletionsTest, CallThatRunsForLongIsLeftBehindWhereOthersWait) {
  constexpr Duration kPatience = std::chrono::seconds(5);
  Completions completions;
  std::promise<void> begun, end, other;
  std::future<void> told = other.get_future();
  completions.Add(0, [&] {
    begun.set_value();
    end.get_future().get();
  });
  begun.get_future().get();
  completions.StandInForLate(Now() + 2 * kPatience, kPatience);  // nothing waits
  const TimePoint added = Now();
  completions.Add(0, [&] { other.set_value(); });
  completions.StandInForLate(added + kPatience / 2, kPatience);
  EXPECT_EQ(told.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
  completions.StandInForLate(Now() + 2 * kPatience, kPatience);
  told.get();
  end.set_value();
}

TEST(CompletionsTest, CallThatOvertakesALateOneWaitsForItsTurnToBegin) {
  for (const bool gives_up : {false, true}) {
    Completions completions;
    std::promise<void> begun, end, overtakes;
    std::promise<absl::Status> turn;
    completions.Add(0, [&] {
      begun.set_value();
      end.get_future().get();
      EXPECT_TRUE(completions.AwaitTurn(Now()).ok());  // it is the first
    });
    begun.get_future().get();
    completions.Add(0, [&] {
      overtakes.set_value();
      turn.set_value(completions.AwaitTurn(gives_up ? Now() : Now() + kTestPatience));
    });
    completions.StandInForLate(Now() + 2 * kTestPatience, kTestPatience);
    overtakes.get_future().get();
    std::future<absl::Status> told = turn.get_future();
    if (gives_up) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(told.get()));
      end.set_value();
    } else {
      EXPECT_EQ(told.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
      end.set_value();
      EXPECT_TRUE(told.get().ok());
    }
  }
}

}  // namespace
}  // namespace thalweg::completions_test
