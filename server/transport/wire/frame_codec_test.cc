// Protobuf's own parser and serializer are the reference: the hand-written code must produce the
// same bytes and accept the same frames.
#include "server/transport/wire/frame_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/base/protocol.h"
#include "server/base/printable.h"
#include "server/transport/testing/frame_test_util.h"
#include "server/transport/testing/random_chunks.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg::frame_codec_test {
namespace {

using ::google::protobuf::io::CodedInputStream;
using ::testing::HasSubstr;

TEST(FrameCodecTest, ProtobufsChunkIsParsedAtEverySplit) {
  Random random(2);
  const ChunkFrame chunk = RandomChunk(random, 9);
  const std::string bytes = ToProto(chunk).SerializeAsString();
  const std::string payload = ToProto(chunk).chunk().payload();
  for (size_t a = 0; a <= bytes.size(); ++a) {
    for (size_t b = a; b <= bytes.size(); ++b) {
      const ChunkFrame parsed = MustParseChunk(Sliced(bytes, {a, b}));
      ASSERT_EQ(parsed.header, chunk.header);
      ASSERT_EQ(ToProto(parsed).chunk().payload(), payload);
    }
  }
}

TEST(FrameCodecTest, EveryTruncationIsRefused) {
  Random random(3);
  const std::string bytes = ToProto(RandomChunk(random, 9)).SerializeAsString();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(WhyRefused(bytes.substr(0, size)).code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(FrameCodecTest, ReceivedPayloadIsReadWhereItLies) {
  Random random(4);
  const std::string bytes =
      ToProto(RandomChunk(random, 5000, WireFormat::kFloat16)).SerializeAsString();
  const grpc::ByteBuffer buffer = Sliced(bytes, {100, 3000, 4001});
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  const ChunkFrame parsed = MustParseChunk(buffer);
  ASSERT_EQ(parsed.payload.pieces.size(), slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto& piece = parsed.payload.pieces[i];
    EXPECT_GE(reinterpret_cast<const uint8_t*>(piece.data()), slices[i].begin());
    EXPECT_EQ(reinterpret_cast<const uint8_t*>(piece.data()) + piece.size(), slices[i].end());
  }
}

TEST(FrameCodecTest, SentPayloadIsReferredToAndKeptUntilReleased) {
  auto data = std::make_shared<std::string>(1 << 20, 'x');
  const std::weak_ptr<std::string> watch = data;
  std::optional<grpc::ByteBuffer> buffer;
  {
    const Payload payload(std::as_bytes(std::span(*data)), data);
    buffer = EncodeChunk(ChunkHeader{}, payload);
  }
  const char* begin = data->data();
  data.reset();
  ASSERT_FALSE(watch.expired());
  {
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer->Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(reinterpret_cast<const char*>(slices[1].begin()), begin);
  }
  buffer.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(FrameCodecTest, SentPayloadIsKeptUntilItsLastPieceIsReleased) {
  auto data = std::make_shared<std::string>(3000, 'x');
  const std::weak_ptr<std::string> watch = data;
  std::vector<grpc::Slice> slices;
  {
    const auto bytes = std::as_bytes(std::span(*data));
    Payload payload(bytes.first(1000), data);
    payload.pieces.insert(payload.pieces.end(),
                          {bytes.first(0), bytes.subspan(1000, 500), bytes.subspan(1500)});
    data.reset();
    ASSERT_TRUE(EncodeChunk(ChunkHeader{}, payload).Dump(&slices).ok());
  }
  ASSERT_EQ(slices.size(), 4u);  // the header, and three pieces that are not empty
  for (size_t next : {2, 0, 3, 1}) {
    EXPECT_FALSE(watch.expired());
    slices[next] = grpc::Slice();
  }
  EXPECT_TRUE(watch.expired());
}

TEST(FrameCodecTest, BufferWithoutMessageIsRefused) {
  EXPECT_EQ(ParseFrame(grpc::ByteBuffer()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(FrameCodecTest, ParsedPayloadOutlivesTheBuffer) {
  Random random(5);
  const ChunkFrame chunk = RandomChunk(random, 3000);
  std::optional<grpc::ByteBuffer> buffer = Sliced(ToProto(chunk).SerializeAsString(), {7, 40});
  const ChunkFrame parsed = MustParseChunk(*buffer);
  buffer.reset();
  EXPECT_EQ(ToProto(parsed).SerializeAsString(), ToProto(chunk).SerializeAsString());
}

TEST(FrameCodecTest, SmallFramesRoundTrip) {
  // An earlier release sends neither identity nor proof.
  const std::vector<std::pair<std::string, std::string>> proofs = {{"", ""}, {"id", "proof"}};
  for (const auto& [identity, proof] : proofs) {
    const auto parsed = ParseFrame(EncodeOpen({0x0123456789abcdefu, 3, 7, identity, proof}));
    ASSERT_TRUE(parsed.ok());
    const auto open = std::get<OpenFrame>(*parsed);
    EXPECT_EQ(open.token, 0x0123456789abcdefu);
    EXPECT_EQ(open.stream, 3u);
    EXPECT_EQ(open.num_streams, 7u);
    EXPECT_EQ(open.identity, identity);
    EXPECT_EQ(open.proof, proof);
  }
  const absl::Status why = absl::DeadlineExceededError("job 'a': node 2 is missing");
  const auto failure = ParseFrame(EncodeFailure(why));
  ASSERT_TRUE(failure.ok());
  EXPECT_EQ(std::get<FailureFrame>(*failure).why, why);
}

TEST(FrameCodecTest, LongFailureIsCutBetweenCharacters) {
  std::string text = "x";
  while (text.size() < 5000) text += "ß";
  const auto failure = ParseFrame(EncodeFailure(absl::InternalError(text)));
  ASSERT_TRUE(failure.ok()) << failure.status();
  const std::string got(std::get<FailureFrame>(*failure).why.message());
  EXPECT_LT(got.size(), 2010u);
  EXPECT_EQ(got.substr(0, got.size() - 3), text.substr(0, got.size() - 3));
}

TEST(FrameCodecTest, FailureNeverMeansOk) {
  for (uint32_t code : {0u, 17u, 4000000000u}) {
    v1::Frame frame;
    frame.mutable_failure()->set_code(code);
    const auto parsed = ParseFrame(Sliced(frame.SerializeAsString()));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(std::get<FailureFrame>(*parsed).why.code(), absl::StatusCode::kUnknown);
  }
}

TEST(FrameCodecTest, RefusalsSayWhatWasExpected) {
  const auto message = [](const std::string& bytes) {
    const absl::Status status = WhyRefused(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(""), HasSubstr("expected open, chunk, failure, resumed or acknowledged"));
  EXPECT_THAT(message(Wrapped("\x2a\x01z")), HasSubstr("round has wire type 2, expected 0"));
  EXPECT_THAT(message(Wrapped("\x58\x01")), HasSubstr("loss_scale has wire type 0, expected 1"));
  EXPECT_THAT(message(Wrapped("\x59zzzzzzz")), HasSubstr("loss_scale is cut off"));
  EXPECT_THAT(message(Wrapped("\xf8\x01\x01")), HasSubstr("payload has wire type 0, expected 2"));
  EXPECT_THAT(message(Wrapped("\x08" + std::string(10, '\x80') + "\x01")),
              HasSubstr("epoch is cut off or longer than 10 bytes"));
  EXPECT_THAT(message(Wrapped("\x30\x01") + "\x12"), HasSubstr("length must be that of the rest"));
  EXPECT_THAT(
      message("\x1a" + std::string("\x80\x80\x08\x12\xfc\xff\x07") + std::string(131068, 'x')),
      HasSubstr("65536 bytes at most"));
}

// Computes sizes as docs/codecs.md states them, in a type too wide to overflow.
bool MayBePayload(int wire, unsigned __int128 elems, uint64_t bytes) {
  if (wire >= 1 && wire <= 9) return bytes == elems * SizeOf(static_cast<DType>(wire));
  if (elems > 0xffffffff) return false;
  if (wire == 16) return bytes == elems + 4 * ((elems + 255) / 256);
  if (wire == 17) return bytes == (elems + 7) / 8 + 4 * ((elems + 1023) / 1024);
  return wire == 18 && bytes >= 4 && bytes <= 4 + 5 * elems;
}

// Says whether a receiver knows all values of a chunk.
bool IsKnown(const v1::Chunk& chunk) {
  const uint64_t bytes = chunk.payload().size();
  const bool has_format = chunk.wire() >= 1 && chunk.wire() <= 9;
  const bool is_lossy = chunk.wire() >= 16 && chunk.wire() <= 18;
  if (!has_format && !is_lossy) return false;
  if (bytes > 0 && !MayBePayload(chunk.wire(), chunk.elems(), bytes)) return false;
  constexpr uint64_t kLastPlace = uint64_t{0xffffffff} + 2;
  return v1::ChunkKind_IsValid(chunk.kind()) && v1::Fold_IsValid(chunk.fold()) &&
         chunk.from() <= kLastPlace && chunk.to() <= kLastPlace &&
         chunk.timeout_ms() <= kMaxTimeoutMillis;
}

// Returns what ParseFrame must find in `bytes`, derived with protobuf's code alone; nullopt when it
// must refuse them.
std::optional<v1::Frame> Expected(const std::string& bytes) {
  v1::Frame frame;
  if (!frame.ParseFromString(bytes)) return std::nullopt;
  if (frame.kind_case() == v1::Frame::KIND_NOT_SET) return std::nullopt;
  CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                      static_cast<int>(bytes.size()));
  const uint32_t first_tag = in.ReadTag();
  uint32_t length = 0;
  if (first_tag != 0x12) {
    if (frame.has_chunk()) return std::nullopt;
    return frame;
  }
  if (!in.ReadVarint32(&length) || !in.Skip(static_cast<int>(length))) return std::nullopt;
  if (in.CurrentPosition() != static_cast<int>(bytes.size())) return std::nullopt;
  const v1::Chunk& chunk = frame.chunk();
  const auto& unknown = chunk.GetReflection()->GetUnknownFields(chunk);
  for (int i = 0; i < unknown.field_count(); ++i) {
    if (unknown.field(i).type() == google::protobuf::UnknownField::TYPE_GROUP) return std::nullopt;
    if (chunk.GetDescriptor()->FindFieldByNumber(unknown.field(i).number()) != nullptr) {
      return std::nullopt;
    }
  }
  if (!IsKnown(chunk)) return std::nullopt;
  return frame;
}

// Returns a chunk in a valid but unusual encoding: any order, repetitions, unknown fields, long
// varints.
std::string OddChunk(Random& random) {
  ChunkHeader header;
  header.wire = kFormats[random() % std::size(kFormats)];
  header.elems = random() % 4;
  const size_t bytes = PayloadBytes(header, random);
  std::vector<std::string> fields = {
      "\x30" + std::string(1, static_cast<char>(header.wire)),
      "\x38" + std::string(1, static_cast<char>(header.elems)),
      "\xfa\x01" + std::string(1, static_cast<char>(bytes)) + RandomBytes(random, bytes)};
  constexpr uint64_t kNumbers[] = {1, 2, 3, 4, 5, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19};
  for (size_t extra = random() % 6; extra > 0; --extra) {
    std::string field;
    const uint64_t number = random() % 4 == 0 ? 1 + random() % 40 : kNumbers[random() % 16];
    const bool is_varint = number < 20 && number != 11;
    const uint64_t type = random() % 8 == 0 ? random() % 8 : (is_varint ? 0 : random() % 3);
    AppendVarint(number << 3 | type, &field);
    const bool is_small = random() % 4 > 0;  // a number of an enum
    if (type == 0) AppendVarint(is_small ? random() % 10 : RandomValue(random), &field);
    if (type == 0 && random() % 4 == 0) field.back() |= '\x80', field += '\0';
    if (type == 1) field += RandomBytes(random, 8);
    if (type == 2) field += '\x03' + RandomBytes(random, 3);
    if (type == 5) field += RandomBytes(random, 4);
    fields.insert(fields.begin() + random() % (fields.size() + 1), field);
  }
  std::shuffle(fields.begin(), fields.end(), random);
  std::string all;
  for (const auto& field : fields) all += field;
  return Wrapped(all);
}

void Mutate(Random& random, std::string* bytes) {
  const size_t at = bytes->empty() ? 0 : random() % bytes->size();
  switch (random() % 5) {
    case 0:
      if (!bytes->empty()) (*bytes)[at] ^= static_cast<char>(1 << random() % 8);
      break;
    case 1:
      bytes->resize(at);
      break;
    case 2:
      bytes->insert(at, RandomBytes(random, 1 + random() % 3));
      break;
    case 3:
      bytes->erase(at, 1 + random() % 3);
      break;
    default:
      bytes->append(bytes->substr(at, random() % 8));
  }
}

std::string AnyFrame(Random& random) {
  switch (random() % 8) {
    case 0:
      return RandomBytes(random, random() % 40);
    case 1:
      return Flatten(EncodeOpen({random(), static_cast<uint32_t>(RandomValue(random)),
                                 static_cast<uint32_t>(RandomValue(random)),
                                 RandomBytes(random, random() % 3), RandomBytes(random, 1),
                                 static_cast<uint32_t>(RandomValue(random)), RandomValue(random)}));
    case 4:
      return Flatten(EncodeResumed({RandomValue(random)}));
    case 5:
      return Flatten(EncodeAcknowledged({RandomValue(random)}));
    case 2:
      return Flatten(EncodeFailure(absl::AbortedError(RandomBytes(random, random() % 9))));
    case 3: {
      ChunkFrame chunk = RandomChunk(random, random() % 4);
      if (random() % 4 == 0) chunk.payload = {};
      return ToProto(chunk).SerializeAsString();
    }
    default:
      return OddChunk(random);
  }
}

// Compares what was parsed with protobuf's view of the same bytes.
void ExpectSame(const ParsedFrame& parsed, const v1::Frame& expected) {
  if (const auto* open = std::get_if<OpenFrame>(&parsed)) {
    ASSERT_TRUE(expected.has_open());
    ASSERT_EQ(open->token, expected.open().token());
    ASSERT_EQ(open->stream, expected.open().stream());
    ASSERT_EQ(open->num_streams, expected.open().num_streams());
    ASSERT_EQ(open->identity, expected.open().identity());
    ASSERT_EQ(open->proof, expected.open().proof());
    ASSERT_EQ(open->incarnation, expected.open().incarnation());
    ASSERT_EQ(open->received, expected.open().received());
  } else if (const auto* resumed = std::get_if<ResumedFrame>(&parsed)) {
    ASSERT_TRUE(expected.has_resumed());
    ASSERT_EQ(resumed->received, expected.resumed().received());
  } else if (const auto* acknowledged = std::get_if<AcknowledgedFrame>(&parsed)) {
    ASSERT_TRUE(expected.has_acknowledged());
    ASSERT_EQ(acknowledged->received, expected.acknowledged().received());
  } else if (const auto* failure = std::get_if<FailureFrame>(&parsed)) {
    ASSERT_TRUE(expected.has_failure());
    ASSERT_EQ(std::string(failure->why.message()),
              Printable(expected.failure().message(), kMaxReasonBytes));
  } else {
    v1::Frame known = expected;
    known.DiscardUnknownFields();
    ASSERT_EQ(ToProto(std::get<ChunkFrame>(parsed)).SerializeAsString(), known.SerializeAsString());
  }
}

TEST(FrameCodecTest, AgreesWithProtobufOnRandomAndMutatedFrames) {
  Random random(6);
  google::protobuf::LogSilencer quiet;  // it logs each invalid UTF-8 string
  int accepted = 0;
  for (int i = 0; i < 200000; ++i) {
    std::string bytes = AnyFrame(random);
    for (size_t n = random() % 4; n > 1; --n) Mutate(random, &bytes);
    std::vector<size_t> cuts(random() % 4);
    for (size_t& cut : cuts) cut = random() % (bytes.size() + 1);
    std::sort(cuts.begin(), cuts.end());
    const auto parsed = ParseFrame(Sliced(bytes, cuts));
    const std::optional<v1::Frame> expected = Expected(bytes);
    ASSERT_EQ(parsed.ok(), expected.has_value())
        << "frame " << i << ": " << ::testing::PrintToString(bytes) << parsed.status();
    if (!parsed.ok()) {
      ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    ASSERT_NO_FATAL_FAILURE(ExpectSame(*parsed, *expected));
  }
  // Both outcomes must be frequent, or the comparison shows little.
  EXPECT_GT(accepted, 50000);
  EXPECT_LT(accepted, 150000);
}

}  // namespace
}  // namespace thalweg::frame_codec_test
