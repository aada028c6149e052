#include "client/core/collectives.h"

#include <gtest/gtest.h>

#include <variant>
#include <vector>

namespace thalweg::collectives_test {
namespace {

class CollectivesTest : public ::testing::Test {
 protected:
  // Begins a collective of so many bytes, whose values the sidecar takes at once.
  void Collect(uint64_t bytes) {
    values_.resize(bytes);
    CollectiveCall call;
    call.group = 1;
    call.given = {values_};
    ASSERT_TRUE(collectives_.Start(call, 0, [](const absl::Status&) {}).ok());
    ASSERT_TRUE(collectives_.OnTaken({1, ++sequence_}).ok());
  }

  std::vector<std::byte> values_;
  uint64_t sequence_ = 0;
  std::vector<ipc::ShareArena> shared_;  // that the sidecar has been told
  Collectives collectives_{[this](const ipc::Message& message, int fd) {
    if (const auto* share = std::get_if<ipc::ShareArena>(&message)) {
      EXPECT_GE(fd, 0);
      shared_.push_back(*share);
    }
    return absl::OkStatus();
  }};
};

TEST_F(CollectivesTest, IdleMemoryIsGivenUpForAnEmptyArenaAndItsNumberIsUsedAgain) {
  Collect(1 << 20);
  ASSERT_TRUE(collectives_.GiveUpIdle(Now()).ok());
  Collect(1 << 20);
  ASSERT_EQ(shared_.size(), 1u) << "what was used a moment ago is used again";
  ASSERT_TRUE(collectives_.GiveUpIdle(Now() + kArenaIdleTime).ok());
  ASSERT_EQ(shared_.size(), 2u);
  EXPECT_EQ(shared_[1], (ipc::ShareArena{shared_[0].number, 1}));
  Collect(2 << 20);
  ASSERT_EQ(shared_.size(), 3u);
  EXPECT_EQ(shared_[2], (ipc::ShareArena{shared_[0].number, 2 << 20}));
}

}  // namespace
}  // namespace thalweg::collectives_test
