#include "core/ipc/message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/ipc/random_message.h"

namespace thalweg::ipc::message_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kTypes = std::variant_size_v<Message>;
constexpr uint16_t kHelloType = 1;
constexpr uint16_t kRegisterBucketType = 3;
constexpr uint16_t kHostShardType = 12;

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string Header(const std::string& frame) { return frame.substr(0, kFrameHeaderBytes); }
std::string Body(const Message& message) {
  return EncodeFrame(message, false).substr(kFrameHeaderBytes);
}

// Parses a whole frame with both functions.
absl::StatusOr<Message> ParseFrame(const std::string& frame) {
  auto header = ParseFrameHeader(AsBytes(Header(frame)));
  if (!header.ok()) return header.status();
  const std::string body = frame.substr(kFrameHeaderBytes);
  if (header->body_bytes != body.size()) return absl::InvalidArgumentError("length");
  return ParseBody(header->type, AsBytes(body));
}

std::string U32(uint32_t value) {
  std::string bytes(4, '\0');
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}
std::string I64(int64_t value) {
  return U32(static_cast<uint32_t>(value)) + U32(static_cast<uint32_t>(value >> 32));
}

// Returns the body of a RegisterBucket up to and including the tensor count.
std::string LayoutStart(uint32_t tensors) {
  return U32(0) + U32(0) + std::string(1, '\1') + U32(tensors);
}
std::string Tensor(const std::vector<int64_t>& shape) {
  std::string bytes = U32(1) + "w" + U32(static_cast<uint32_t>(shape.size()));
  for (const int64_t dim : shape) bytes += I64(dim);
  return bytes;
}
absl::Status ParseLayout(const std::string& layout) {
  const std::string body = layout + std::string(13, '\0');  // without a GPU's memory or an update
  return ParseBody(kRegisterBucketType, AsBytes(body)).status();
}

// The expected bytes are those of docs/ipc.md, written out by hand.
TEST(MessageTest, FrameIsTheDocumentedBytes) {
  const std::string submit(
      "THW1\x05\x00\x00\x00\x29\x00\x00\x00"
      "\x02\x00\x00\x00\x01\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00"
      "\x01\x00\x00\x00\x05\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00\x01"
      "\x0b\x00\x00\x00\x00\x00\x00\x00",
      53);
  EXPECT_EQ(EncodeFrame(Submit{{2, 1}, 7, {5}, 9, UpdateRound::kPull, 11}, false), submit);
  const std::string register_bucket(
      "THW1\x03\x00\x01\x00\x53\x00\x00\x00"
      "\x02\x00\x00\x00\x01\x00\x00\x00\x01\x01\x00\x00\x00"
      "\x01\x00\x00\x00w\x02\x00\x00\x00"
      "\x03\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00"
      "\x01\x00\x00\x00u\x01\x00\x00\x00m\x01\x00\x00\x00\x65"
      "\x01\x02\x01\x00\x00\x01\x01\x00\x00\x00\x05\x00\x00\x00\x02"
      "\x03\x00\x00\x00\x00\x01\x02\x00\x00\x00\xf4\x01\x00\x00\x01",
      12 + 0x53);
  const UpdateRule adamw = {.optimizer = Optimizer::kAdam,
                            .decoupled = true,
                            .commits = true,
                            .groups = {5},
                            .down = WireFormat::kFloat16,
                            .ahead = 3,
                            .delay_aware = true,
                            .quorum = 2,
                            .grace_ms = 500,
                            .drops_late = true};
  EXPECT_EQ(
      EncodeFrame(
          RegisterBucket{{2, 1}, {DType::kFloat32, {{"w", {3, 4}}}}, {"u", "m", "e"}, adamw}, true),
      register_bucket);
  const std::string precision(
      "THW1\x0b\x00\x00\x00\x10\x00\x00\x00"
      "\x00\x00\x00\x00\x00\x00\xe0\x3f\x03\x00\x00\x00\x00\x00\x00\x00",
      28);
  EXPECT_EQ(EncodeFrame(Precision{0.5, 3}, false), precision);
}

TEST(MessageTest, EveryMessageSurvivesTheRoundTrip) {
  RandomMessages random(1);
  for (int i = 0; i < 500; ++i) {
    for (size_t type = 0; type < kTypes; ++type) {
      const Message message = random.OfType(type);
      const bool has_fd = random.Below(2) == 1;
      const std::string frame = EncodeFrame(message, has_fd);
      auto header = ParseFrameHeader(AsBytes(Header(frame)));
      ASSERT_TRUE(header.ok()) << header.status();
      EXPECT_EQ(header->type, type + 1);
      EXPECT_EQ(header->has_fd, has_fd);
      EXPECT_EQ(header->body_bytes, frame.size() - kFrameHeaderBytes);
      auto parsed = ParseFrame(frame);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(*parsed, message);
    }
  }
}

TEST(MessageTest, EveryTruncationIsRefused) {
  RandomMessages random(2);
  for (int i = 0; i < 20; ++i) {
    for (size_t type = 0; type < kTypes; ++type) {
      const Message message = random.OfType(type);
      const std::string frame = EncodeFrame(message, false);
      for (size_t size = 0; size < kFrameHeaderBytes; ++size) {
        EXPECT_TRUE(
            absl::IsInvalidArgument(ParseFrameHeader(AsBytes(frame.substr(0, size))).status()));
      }
      const std::string body = Body(message);
      for (size_t size = 0; size < body.size(); ++size) {
        const auto parsed = ParseBody(type + 1, AsBytes(body.substr(0, size)));
        EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << Name(message) << " " << size;
      }
    }
  }
}

TEST(MessageTest, TrailingByteIsRefused) {
  RandomMessages random(3);
  for (size_t type = 0; type < kTypes; ++type) {
    const auto parsed = ParseBody(type + 1, AsBytes(Body(random.OfType(type)) + '\0'));
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status()));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("1 bytes too many"));
  }
}

TEST(MessageTest, BadHeadersAreRefusedByName) {
  const std::string good = Header(EncodeFrame(Leave{}, false));
  const struct {
    size_t offset;
    std::string bytes;
    std::string expected;
  } cases[] = {
      {0, "X", "not a Thalweg process"},
      {4, std::string(2, '\0'), "type 0"},
      {4, std::string(1, static_cast<char>(kTypes + 1)), absl::StrCat("type ", kTypes + 1)},
      {6, "\x02", "flags 2"},
      {8, U32(kMaxFrameBytes + 1), "frame of 16777217 bytes"}};
  for (const auto& c : cases) {
    std::string bad = good;
    bad.replace(c.offset, c.bytes.size(), c.bytes);
    const auto parsed = ParseFrameHeader(AsBytes(bad));
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status()));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(c.expected));
  }
  std::string longest = good;
  EXPECT_TRUE(ParseFrameHeader(AsBytes(longest.replace(8, 4, U32(kMaxFrameBytes)))).ok());
  EXPECT_FALSE(ParseFrameHeader(AsBytes(good + '\0')).ok());
  EXPECT_FALSE(ParseBody(0, {}).ok());
  EXPECT_FALSE(ParseBody(12, {}).ok());
}

TEST(MessageTest, OtherVersionIsRefusedNamingBothWhateverItsOtherFieldsAre) {
  const std::string older = U32(kIpcVersion - 1) + "the fields of that version";
  for (const uint16_t type : {kHelloType, kHostShardType}) {
    const absl::Status refused = ParseBody(type, AsBytes(older)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused));
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr(absl::StrCat("ipc version ", kIpcVersion - 1)),
                      HasSubstr(absl::StrCat("sidecar ", kIpcVersion))));
  }
}

TEST(MessageTest, InvalidElementTypeIsRefused) {
  for (const char bad : {'\0', '\n', '\xff'}) {
    EXPECT_THAT(std::string(ParseLayout(U32(0) + U32(0) + std::string(1, bad) + U32(0)).message()),
                HasSubstr("element type"));
  }
}

TEST(MessageTest, UnknownPathOfGradientsIsRefused) {
  for (const char bad : {'\0', '\5', '\xff'}) {
    std::string body = Body(Welcome{});
    body[body.size() - 1 - 5 * U32(0).size()] = bad;  // path, before an empty text and no terms
    const auto parsed = ParseBody(2, AsBytes(body));
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status()));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("expected 1 to 4"));
  }
}

TEST(MessageTest, StatusCodeOutOfRangeIsRefused) {
  for (const uint32_t bad : {0u, 17u, 0xffffffffu}) {
    const auto parsed = ParseBody(7, AsBytes(U32(bad) + U32(0)));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("expected 1 to 16"));
  }
}

TEST(MessageTest, CountsBeyondTheBytesThereAreRefused) {
  // A list whose items cannot fit is refused before memory is allocated for them: 4 billion items
  // would show under a sanitizer or a memory limit.
  EXPECT_THAT(std::string(ParseLayout(LayoutStart(1'000'000)).message()), HasSubstr("13 are left"));
  EXPECT_THAT(std::string(ParseLayout(LayoutStart(0xffffffff)).message()),
              HasSubstr("at most 1000000"));
  EXPECT_FALSE(ParseLayout(LayoutStart(2) + Tensor({})).ok());
  EXPECT_FALSE(ParseLayout(LayoutStart(1) + U32(0xffffffff)).ok());
  EXPECT_FALSE(ParseLayout(LayoutStart(1) + U32(0) + U32(0xffffffff)).ok());
  EXPECT_FALSE(ParseLayout(LayoutStart(1) + U32(0) + U32(2) + I64(1)).ok());
}

TEST(MessageTest, TensorCountIsBounded) {
  const std::string scalar(8, '\0');  // no name, no dimensions
  std::string body = LayoutStart(kMaxTensors);
  for (uint32_t i = 0; i < kMaxTensors; ++i) body += scalar;
  EXPECT_TRUE(ParseLayout(body).ok());
  body.replace(0, LayoutStart(0).size(), LayoutStart(kMaxTensors + 1));
  EXPECT_THAT(std::string(ParseLayout(body + scalar).message()), HasSubstr("1000001 tensors"));
}

TEST(MessageTest, ShapesThatOverflowAreRefused) {
  const int64_t limit = static_cast<int64_t>(kMaxBucketElems);
  EXPECT_TRUE(ParseLayout(LayoutStart(1) + Tensor({limit})).ok());
  EXPECT_TRUE(ParseLayout(LayoutStart(1) + Tensor({0, 5})).ok());
  EXPECT_TRUE(ParseLayout(LayoutStart(1) + Tensor(std::vector<int64_t>(kMaxDims, 1))).ok());
  const std::vector<std::vector<int64_t>> bad = {{-1},
                                                 {3, INT64_MIN},
                                                 {limit + 1},
                                                 {limit, 2},
                                                 {INT64_MAX, INT64_MAX},
                                                 {int64_t{1} << 32, int64_t{1} << 32},
                                                 {0, limit, 2},
                                                 std::vector<int64_t>(kMaxDims + 1, 1)};
  for (const auto& shape : bad) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseLayout(LayoutStart(1) + Tensor(shape))))
        << ::testing::PrintToString(shape);
  }
  EXPECT_THAT(std::string(ParseLayout(LayoutStart(2) + Tensor({limit}) + Tensor({1})).message()),
              HasSubstr("bucket has more than"));
}

std::string Mutate(std::string frame, RandomMessages& random) {
  for (uint64_t i = 0, n = 1 + random.Below(4); i < n && !frame.empty(); ++i) {
    const size_t at = random.Below(frame.size());
    switch (random.Below(5)) {
      case 0:
        frame[at] = static_cast<char>(frame[at] ^ (1 << random.Below(8)));
        break;
      case 1:
        frame.resize(at);
        break;
      case 2:
        frame.insert(at, random.Bytes(1 + random.Below(9)));
        break;
      case 3:
        frame.erase(at, 1 + random.Below(9));
        break;
      default:
        frame.replace(at, 4, U32(static_cast<uint32_t>(-1) >> random.Below(32)));
    }
  }
  return frame;
}

// Every accepted frame must equal what EncodeFrame makes of the message: nothing is guessed,
// ignored or normalised.
TEST(MessageTest, RandomAndMutatedFramesAreRefusedOrCanonical) {
  RandomMessages random(4);
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    const bool mutated = i % 4 != 0;
    const std::string frame = mutated ? Mutate(EncodeFrame(random.Any(), i % 2 == 0), random)
                                      : random.Bytes(random.Below(80));
    const auto header = ParseFrameHeader(AsBytes(Header(frame)));
    if (frame.size() < kFrameHeaderBytes) continue;
    // Bodies of refused headers are parsed too: each function is tested independently.
    const uint16_t type = header.ok() ? header->type : static_cast<uint16_t>(1 + i % kTypes);
    const std::string body = frame.substr(kFrameHeaderBytes);
    const auto message = ParseBody(type, AsBytes(body));
    if (!message.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(message.status()));
      continue;
    }
    ++accepted;
    EXPECT_EQ(Body(*message), body);
    if (header.ok() && header->body_bytes == body.size()) {
      EXPECT_EQ(EncodeFrame(*message, header->has_fd), frame);
    }
  }
  EXPECT_GT(accepted, 1000);  // otherwise the mutations are too strong to test anything
}

}  // namespace
}  // namespace thalweg::ipc::message_test
