// Every field of a chunk must cross the wire, as protobuf's bytes, and what no field can be must be
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/transport/testing/frame_test_util.h"
#include "server/transport/testing/random_chunks.h"
#include "server/transport/wire/chunk_fields.h"
#include "server/transport/wire/frame_codec.h"

namespace thalweg::frame_fields_test {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using ::testing::HasSubstr;

ChunkHeader Returned(const ChunkHeader& header) {
  return MustParseChunk(EncodeChunk(header, {})).header;
}

TEST(FrameFieldsTest, ChunkBytesEqualProtobufs) {
  Random random(1);
  for (int i = 0; i < 5000; ++i) {
    ChunkFrame chunk = RandomChunk(random, random() % 70);
    if (random() % 8 == 0) chunk.payload = {};
    ASSERT_EQ(Flatten(EncodeChunk(chunk.header, chunk.payload)),
              ToProto(chunk).SerializeAsString());
  }
}

TEST(FrameFieldsTest, EveryFieldReturns) {
  Random random(2);
  for (int i = 0; i < 5000; ++i) {
    const ChunkFrame chunk = RandomChunk(random, random() % 70);
    ASSERT_EQ(MustParseChunk(EncodeChunk(chunk.header, chunk.payload)).header, chunk.header);
  }
}

TEST(FrameFieldsTest, ExtremeValuesAreEncodedAsProtobufDoes) {
  constexpr uint32_t k32 = std::numeric_limits<uint32_t>::max();
  constexpr uint64_t k64 = std::numeric_limits<uint64_t>::max();
  using Double = std::numeric_limits<double>;
  for (const double scale :
       {0.0, -0.0, -1.0, Double::max(), Double::denorm_min(), Double::infinity()}) {
    ChunkFrame chunk{{{{k32, k32}, k32, k64}, k64, WireFormat::kFloat64, k64, k32, k64, scale}, {}};
    chunk.header.acknowledged = k64;
    chunk.header.id.bucket.part = k32;
    chunk.header.kind = ChunkKind::kResult;
    chunk.header.group = k32;
    chunk.header.collective = {Place::One(k32), Place::One(k32), Fold::kNone};
    chunk.header.timeout = kMaxRoundPatience;
    chunk.header.settled = k64;
    const std::string bytes = ToProto(chunk).SerializeAsString();
    EXPECT_EQ(Flatten(EncodeChunk(chunk.header, chunk.payload)), bytes);
    EXPECT_EQ(MustParseChunk(Sliced(bytes)).header, chunk.header);
  }
}

TEST(FrameFieldsTest, WorkedExampleOfTheDocumentation) {
  const float value = 1.0f;
  const ChunkHeader header{{{3, 1}, 2, 300}, 7, WireFormat::kFloat32, 1};
  const Payload payload(std::as_bytes(std::span(&value, 1)), nullptr);
  const std::string expected(
      "\x12\x16"
      "\x08\x07\x10\x03\x18\x01\x20\x02\x28\xac\x02\x30\x01\x38\x01"
      "\xfa\x01\x04\x00\x00\x80\x3f",
      24);
  EXPECT_EQ(Flatten(EncodeChunk(header, payload)), expected);
  ChunkHeader ready{{OneShotsOf(2), 0, 5}, 7, WireFormat::kFloat32, 1};
  ready.group = 2;
  ready.collective = {Place::One(0), Place::All(), Fold::kNone};
  ready.timeout = milliseconds(1500);
  ready.settled = 4;
  EXPECT_EQ(Flatten(EncodeChunk(ready, {})),
            "\x12\x1e"
            "\x08\x07\x10\xff\xff\xff\xff\x0f\x18\x02\x28\x05\x30\x01\x38\x01"
            "\x70\x02\x78\x02\x88\x01\x08\x90\x01\xdc\x0b\x98\x01\x04");
  const std::string open("\x0a\x0d\x09\xef\xcd\xab\x89\x67\x45\x23\x01\x10\x01\x18\x02", 15);
  EXPECT_EQ(Flatten(EncodeOpen({0x0123456789abcdefu, 1, 2})), open);
  const std::string identity(32, 'i');
  const std::string proof(64, 'p');
  EXPECT_EQ(Flatten(EncodeOpen({0x0123456789abcdefu, 1, 2, identity, proof})),
            "\x0a\x71" + open.substr(2) + "\x22\x20" + identity + "\x2a\x40" + proof);
}

TEST(FrameFieldsTest, MeanOfAllForAllCostsNoBytes) {
  const Contribution mean{.id = {{3, 1}, 2, 300}, .epoch = 7, .elems = 1, .payload = {}};
  const v1::Frame frame = ToProto({HeaderOf(mean), {}});
  EXPECT_EQ(Flatten(EncodeChunk(HeaderOf(mean), {})).size(), 17u);
  std::vector<const google::protobuf::FieldDescriptor*> set;
  frame.chunk().GetReflection()->ListFields(frame.chunk(), &set);
  EXPECT_EQ(set.size(), 7u);
}

TEST(FrameFieldsTest, ContributionBecomesAHeaderAndOneAgain) {
  Random random(3);
  for (int i = 0; i < 100; ++i) {
    ChunkHeader header = RandomChunk(random, 1).header;
    header.kind = ChunkKind::kContribution;
    header.workers = 0;
    header.nonfinite_elems = 0;
    header.acknowledged = 0;
    ASSERT_EQ(HeaderOf(ToContribution(header, {})), header);
  }
}

TEST(FrameFieldsTest, ResultBecomesAHeaderAndOneAgain) {
  const ChunkHeader header{.id = {{1, 2, 3}, 4, 5},
                           .epoch = 6,
                           .wire = WireFormat::kInt8,
                           .elems = 7,
                           .workers = 8,
                           .nonfinite_elems = 9,
                           .kind = ChunkKind::kResult};
  EXPECT_EQ(HeaderOf(ToResult(header, {})), header);
}

TEST(FrameFieldsTest, TimeoutIsRoundedUpToMilliseconds) {
  const std::vector<std::pair<Duration, Duration>> sent_and_received = {
      {Duration::zero(), Duration::zero()},
      {nanoseconds(1), milliseconds(1)},
      {milliseconds(1500), milliseconds(1500)},
      {microseconds(1'500'001), milliseconds(1501)},
      {nanoseconds(-1), Duration::zero()},
      {Duration::min(), Duration::zero()},
      {hours(24), hours(24)},
      {kMaxRoundPatience - nanoseconds(1), kMaxRoundPatience},
      {Duration::max(), kMaxRoundPatience},
  };
  for (const auto& [sent, received] : sent_and_received) {
    ChunkHeader header;
    header.timeout = sent;
    EXPECT_EQ(Returned(header).timeout, received) << ToNanos(sent);
  }
}

TEST(FrameFieldsTest, EmptyPayloadIsLegalWithAnyNumberOfElements) {
  for (const WireFormat wire : kFormats) {
    for (const uint64_t elems : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      ChunkHeader header;
      header.wire = wire;
      header.elems = elems;
      EXPECT_EQ(Returned(header), header);
    }
  }
}

// 2^62 + 1 fp32 elements would take 4 bytes if the size were computed by a multiplication that
// overflows.
TEST(FrameFieldsTest, OverflowingElementCountIsRefused) {
  const std::string bytes(4, 'x');
  ChunkFrame chunk;
  chunk.header.elems = (uint64_t{1} << 62) + 1;
  chunk.payload = Payload(std::as_bytes(std::span(bytes)), nullptr);
  EXPECT_THAT(std::string(WhyRefused(ToProto(chunk).SerializeAsString()).message()),
              HasSubstr("the payload has 4 bytes"));
}

// Returns the sentence with which a chunk in fp32 is refused that has these fields as well.
std::string RefusalOf(const std::string& fields) {
  const absl::Status status = WhyRefused(Wrapped("\x30\x01" + fields));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(FrameFieldsTest, UnknownFormatsKindsAndFoldsAreRefused) {
  EXPECT_THAT(RefusalOf("\x30\x0a"), HasSubstr("wire is 10, expected 1 to 9 or 16 to 18"));
  EXPECT_THAT(RefusalOf("\x38\x02\xfa\x01\x04zzzz"),
              HasSubstr("has 4 bytes, expected 2 elements in fp32"));
  EXPECT_THAT(RefusalOf("\x68\x02"), HasSubstr("kind is 2, expected 0 or 1"));
  EXPECT_THAT(RefusalOf("\x68\x81\x02"), HasSubstr("kind is 257, expected 0 or 1"));
  EXPECT_THAT(RefusalOf("\x88\x01\x09"), HasSubstr("fold is 9, expected 0 to 8"));
  EXPECT_THAT(RefusalOf("\x88\x01\x80\x02"), HasSubstr("fold is 256, expected 0 to 8"));
  EXPECT_THAT(RefusalOf("\x88\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
              HasSubstr("fold is 4294967295, expected 0 to 8"));
}

TEST(FrameFieldsTest, PlaceOfNoNodeIsRefused) {
  // 2^32 + 1 is the place of node 2^32 - 1.
  const ChunkFrame last = MustParseChunk(
      Sliced(Wrapped("\x30\x01\x78\x81\x80\x80\x80\x10\x80\x01\x81\x80\x80\x80\x10")));
  EXPECT_EQ(last.header.collective.from, Place::One(0xffffffff));
  EXPECT_EQ(last.header.collective.to, Place::One(0xffffffff));
  EXPECT_THAT(RefusalOf("\x78\x82\x80\x80\x80\x10"),
              HasSubstr("from is 4294967298, expected at most 4294967297"));
  EXPECT_THAT(RefusalOf("\x80\x01\x82\x80\x80\x80\x10"),
              HasSubstr("to is 4294967298, expected at most 4294967297"));
}

TEST(FrameFieldsTest, TimeoutOfMoreThanTenYearsIsRefused) {
  std::string most;
  AppendVarint(kMaxTimeoutMillis, &most);
  EXPECT_EQ(MustParseChunk(Sliced(Wrapped("\x30\x01\x90\x01" + most))).header.timeout,
            kMaxRoundPatience);
  for (const uint64_t value : {kMaxTimeoutMillis + 1, ~uint64_t{0}}) {
    std::string varint;
    AppendVarint(value, &varint);
    EXPECT_THAT(RefusalOf("\x90\x01" + varint),
                HasSubstr(std::to_string(value) + ", expected at most 315360000000"));
  }
}

TEST(FrameFieldsTest, WrongWireTypesNameTheField) {
  EXPECT_THAT(RefusalOf("\x6a\x01z"), HasSubstr("kind has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x75zzzz"), HasSubstr("group has wire type 5, expected 0"));
  EXPECT_THAT(RefusalOf("\x7a\x01z"), HasSubstr("from has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x82\x01\x01z"), HasSubstr("to has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x8a\x01\x01z"), HasSubstr("fold has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x92\x01\x01z"), HasSubstr("timeout_ms has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x9a\x01\x01z"), HasSubstr("settled has wire type 2, expected 0"));
  EXPECT_THAT(RefusalOf("\x98\x01"), HasSubstr("settled is cut off or longer than 10 bytes"));
}

}  // namespace
}  // namespace thalweg::frame_fields_test
