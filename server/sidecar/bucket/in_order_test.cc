#include "server/sidecar/bucket/in_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <vector>

#include "core/base/thread.h"

namespace thalweg::in_order_test {
namespace {

using ::testing::ElementsAre;

TEST(InOrderTest, WhatComesEarlyWaitsForWhatIsBeforeIt) {
  InOrder order;
  std::vector<int> done;
  const auto add = [&done](int number) {
    return [&done, number] {
      done.push_back(number);
      return absl::OkStatus();
    };
  };
  ASSERT_TRUE(order.Do(2, add(2)).ok());
  ASSERT_TRUE(order.Do(1, add(1)).ok());
  EXPECT_TRUE(done.empty());
  ASSERT_TRUE(order.Do(0, add(0)).ok());
  EXPECT_THAT(done, ElementsAre(0, 1, 2));
  ASSERT_TRUE(order.Do(3, add(3)).ok());
  EXPECT_THAT(done, ElementsAre(0, 1, 2, 3));
}

TEST(InOrderTest, WhatComesWhileAnotherThreadIsAtItIsDoneByThatOneInItsTurn) {
  InOrder order;
  std::vector<int> done;
  std::promise<void> begun, may_end;
  Thread first("first", [&] {
    EXPECT_TRUE(order
                    .Do(0,
                        [&] {
                          begun.set_value();
                          may_end.get_future().wait();
                          done.push_back(0);
                          return absl::OkStatus();
                        })
                    .ok());
  });
  begun.get_future().wait();
  ASSERT_TRUE(order
                  .Do(1,
                      [&done] {
                        done.push_back(1);
                        return absl::OkStatus();
                      })
                  .ok());
  EXPECT_TRUE(done.empty());  // Do has not waited, and nobody writes yet
  may_end.set_value();
  first = Thread();
  EXPECT_THAT(done, ElementsAre(0, 1));
}

TEST(InOrderTest, NothingIsDoneAfterAFailure) {
  InOrder order;
  bool is_done = false;
  ASSERT_TRUE(order
                  .Do(1,
                      [&is_done] {
                        is_done = true;
                        return absl::OkStatus();
                      })
                  .ok());
  EXPECT_EQ(order.Do(0, [] { return absl::AbortedError("no"); }), absl::AbortedError("no"));
  ASSERT_TRUE(order.Do(2, [] { return absl::OkStatus(); }).ok());
  EXPECT_FALSE(is_done);
}

}  // namespace
}  // namespace thalweg::in_order_test
