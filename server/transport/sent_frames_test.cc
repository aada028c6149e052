#include "server/transport/sent_frames.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace thalweg::sent_frames_test {
namespace {

grpc::ByteBuffer Frame(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Bytes(const grpc::ByteBuffer& frame) {
  grpc::Slice slice;
  EXPECT_TRUE(frame.DumpToSingleSlice(&slice).ok());
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

std::vector<std::string> All(const SentFrames::Frames& frames) {
  std::vector<std::string> all;
  for (const grpc::ByteBuffer& frame : frames) all.push_back(Bytes(frame));
  return all;
}

class SentFramesTest : public ::testing::Test {
 protected:
  SentFramesTest() {
    for (const char* name : {"a", "b", "c"}) sent_.Add(Frame(name));
  }
  using Names = std::vector<std::string>;

  SentFrames sent_;
  SentFrames::Frames released_;
};

TEST_F(SentFramesTest, FramesThatCountAreCountedUntilTheyAreAcknowledged) {
  sent_.Add(Frame("d"), /*counts=*/false);
  EXPECT_EQ(sent_.counted(), 3u);
  ASSERT_TRUE(sent_.Acknowledge(2, &released_).ok());
  EXPECT_EQ(sent_.counted(), 1u);
  ASSERT_TRUE(sent_.Acknowledge(4, &released_).ok());
  EXPECT_EQ(sent_.counted(), 0u);
  sent_.Add(Frame("e"));
  sent_.Clear();
  EXPECT_EQ(sent_.counted(), 0u);
}

TEST_F(SentFramesTest, AcknowledgedFramesAreReleasedAndTheRestStaysInOrder) {
  ASSERT_TRUE(sent_.Acknowledge(1, &released_).ok());
  EXPECT_EQ(All(released_), Names{"a"});
  EXPECT_EQ(All(sent_.frames()), (Names{"b", "c"}));
  sent_.Add(Frame("d"));
  ASSERT_TRUE(sent_.Acknowledge(3, &released_).ok());
  EXPECT_EQ(All(released_), (Names{"a", "b", "c"}));
  EXPECT_EQ(All(sent_.frames()), Names{"d"});
}

TEST_F(SentFramesTest, AnOlderAcknowledgementChangesNothing) {
  ASSERT_TRUE(sent_.Acknowledge(2, &released_).ok());
  ASSERT_TRUE(sent_.Acknowledge(1, &released_).ok());
  ASSERT_TRUE(sent_.Acknowledge(0, &released_).ok());
  EXPECT_EQ(All(sent_.frames()), Names{"c"});
}

TEST_F(SentFramesTest, FramesThatWereNeverSentCannotBeAcknowledged) {
  ASSERT_TRUE(sent_.Acknowledge(1, &released_).ok());
  const absl::Status status = sent_.Acknowledge(4, &released_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "the peer acknowledges 4 frames, expected 3 at most");
  EXPECT_EQ(All(sent_.frames()), (Names{"b", "c"}));
}

TEST_F(SentFramesTest, NumbersGoOnAfterClear) {
  EXPECT_EQ(All(sent_.Clear()), (Names{"a", "b", "c"}));
  EXPECT_TRUE(sent_.frames().empty());
  EXPECT_TRUE(sent_.Acknowledge(3, &released_).ok());
  EXPECT_FALSE(sent_.Acknowledge(4, &released_).ok());
}

}  // namespace
}  // namespace thalweg::sent_frames_test
