// Protobuf's own parser and serializer are the reference: the hand-written code must produce the
// same bytes and accept the same frames.
#include "server/transport/frame_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/base/printable.h"
#include "core/base/protocol.h"
#include "thalweg/v1/exchange.pb.h"

namespace thalweg {
namespace {

using ::google::protobuf::io::CodedInputStream;
using ::testing::HasSubstr;
using Random = std::mt19937_64;

// Returns values of every varint length.
uint64_t RandomValue(Random& random) { return random() >> (random() % 64); }

std::string RandomBytes(Random& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

constexpr WireFormat kFormats[] = {
    WireFormat::kFloat32, WireFormat::kFloat16, WireFormat::kBFloat16, WireFormat::kFloat64,
    WireFormat::kInt8,    WireFormat::kOneBit,  WireFormat::kTopK};

// Returns a valid payload length for such a chunk.
size_t PayloadBytes(const ChunkHeader& header, Random& random) {
  const size_t most = MaxEncodedBytes(header.wire, header.elems);
  return header.wire == WireFormat::kTopK ? 4 + random() % (most - 3) : most;
}

ChunkFrame RandomChunk(Random& random, uint64_t elems, WireFormat wire) {
  ChunkFrame chunk;
  ChunkHeader& header = chunk.header;
  header.id.bucket = {static_cast<uint32_t>(RandomValue(random)),
                      static_cast<uint32_t>(RandomValue(random))};
  header.id.bucket.part = random() % kMaxParts;
  header.id.chunk = static_cast<uint32_t>(RandomValue(random));
  header.id.round = RandomValue(random);
  header.epoch = random() % 8 == 0 ? 0 : RandomValue(random);
  header.wire = wire;
  header.elems = elems;
  header.workers = static_cast<uint32_t>(RandomValue(random));
  header.nonfinite_elems = RandomValue(random);
  if (random() % 2 == 0) header.acknowledged = RandomValue(random);
  if (random() % 2 == 0) header.loss_scale = std::ldexp(1.0 + random() % 2, random() % 64 - 32);
  auto data =
      std::make_shared<std::string>(RandomBytes(random, PayloadBytes(chunk.header, random)));
  const auto bytes = std::as_bytes(std::span(*data));
  chunk.payload.owner = data;
  const size_t cut = bytes.empty() ? 0 : random() % bytes.size();
  chunk.payload.pieces = {bytes.first(cut), bytes.subspan(cut)};
  return chunk;
}

ChunkFrame RandomChunk(Random& random, uint64_t elems) {
  return RandomChunk(random, elems, kFormats[random() % std::size(kFormats)]);
}

v1::Frame ToProto(const ChunkFrame& chunk) {
  v1::Frame frame;
  v1::Chunk& proto = *frame.mutable_chunk();
  const ChunkHeader& header = chunk.header;
  proto.set_epoch(header.epoch);
  proto.set_bucket_index(header.id.bucket.index);
  proto.set_bucket_generation(header.id.bucket.generation);
  proto.set_chunk(header.id.chunk);
  proto.set_round(header.id.round);
  proto.set_wire(static_cast<v1::WireFormat>(header.wire));
  proto.set_elems(header.elems);
  proto.set_workers(header.workers);
  proto.set_nonfinite_elems(header.nonfinite_elems);
  proto.set_part(header.id.bucket.part);
  proto.set_loss_scale(header.loss_scale);
  proto.set_acknowledged(header.acknowledged);
  for (const auto& piece : chunk.payload.pieces) {
    proto.mutable_payload()->append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return frame;
}

std::string Flatten(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const auto& s : slices) bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
  return bytes;
}

// Returns `bytes` as a buffer that is cut at every position in `cuts` (ascending).
grpc::ByteBuffer Sliced(const std::string& bytes, const std::vector<size_t>& cuts = {}) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (size_t cut : cuts) {
    slices.emplace_back(bytes.substr(begin, cut - begin));
    begin = cut;
  }
  slices.emplace_back(bytes.substr(begin));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::Status Refusal(const std::string& bytes) { return ParseFrame(Sliced(bytes)).status(); }

ChunkFrame MustParseChunk(const grpc::ByteBuffer& buffer) {
  auto parsed = ParseFrame(grpc::ByteBuffer(buffer));
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok() || !std::holds_alternative<ChunkFrame>(*parsed)) return {};
  return std::get<ChunkFrame>(*parsed);
}

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 128; value >>= 7) out->push_back(static_cast<char>(value % 128 + 128));
  out->push_back(static_cast<char>(value));
}

std::string Wrapped(const std::string& chunk_fields) {
  std::string frame = "\x12";
  AppendVarint(chunk_fields.size(), &frame);
  return frame + chunk_fields;
}

TEST(FrameCodecTest, ChunkBytesEqualProtobufs) {
  Random random(1);
  for (int i = 0; i < 5000; ++i) {
    const ChunkFrame chunk = RandomChunk(random, random() % 70);
    ASSERT_EQ(Flatten(EncodeChunk(chunk.header, chunk.payload)),
              ToProto(chunk).SerializeAsString());
  }
}

TEST(FrameCodecTest, ExtremeValuesAreEncodedAsProtobufDoes) {
  constexpr uint32_t k32 = std::numeric_limits<uint32_t>::max();
  constexpr uint64_t k64 = std::numeric_limits<uint64_t>::max();
  using Double = std::numeric_limits<double>;
  for (const double scale :
       {0.0, -0.0, -1.0, Double::max(), Double::denorm_min(), Double::infinity()}) {
    const ChunkFrame chunk{{{{k32, k32}, k32, k64}, k64, WireFormat::kFloat64, 0, k32, k64, scale},
                           {}};
    const std::string bytes = ToProto(chunk).SerializeAsString();
    EXPECT_EQ(Flatten(EncodeChunk(chunk.header, chunk.payload)), bytes);
    EXPECT_EQ(MustParseChunk(Sliced(bytes)).header, chunk.header);
  }
}

TEST(FrameCodecTest, WorkedExampleOfTheDocumentation) {
  const float value = 1.0f;
  const ChunkHeader header{{{3, 1}, 2, 300}, 7, WireFormat::kFloat32, 1};
  const Payload payload(std::as_bytes(std::span(&value, 1)), nullptr);
  const std::string expected(
      "\x12\x15"
      "\x08\x07\x10\x03\x18\x01\x20\x02\x28\xac\x02\x30\x01\x38\x01"
      "\x7a\x04\x00\x00\x80\x3f",
      23);
  EXPECT_EQ(Flatten(EncodeChunk(header, payload)), expected);
  const std::string open("\x0a\x0d\x09\xef\xcd\xab\x89\x67\x45\x23\x01\x10\x01\x18\x02", 15);
  EXPECT_EQ(Flatten(EncodeOpen({0x0123456789abcdefu, 1, 2})), open);
  const std::string identity(32, 'i');
  const std::string proof(64, 'p');
  EXPECT_EQ(Flatten(EncodeOpen({0x0123456789abcdefu, 1, 2, identity, proof})),
            "\x0a\x71" + open.substr(2) + "\x22\x20" + identity + "\x2a\x40" + proof);
}

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
    EXPECT_EQ(Refusal(bytes.substr(0, size)).code(), absl::StatusCode::kInvalidArgument) << size;
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
    const absl::Status status = Refusal(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(""), HasSubstr("expected open, chunk, failure or resumed"));
  EXPECT_THAT(message(Wrapped("\x2a\x01z")), HasSubstr("round has wire type 2, expected 0"));
  EXPECT_THAT(message(Wrapped("\x58\x01")), HasSubstr("loss_scale has wire type 0, expected 1"));
  EXPECT_THAT(message(Wrapped("\x59zzzzzzz")), HasSubstr("loss_scale is cut off"));
  EXPECT_THAT(message(Wrapped("\x78\x01")), HasSubstr("payload has wire type 0, expected 2"));
  EXPECT_THAT(message(Wrapped("\x30\x09")), HasSubstr("wire is 9, expected 1 to 4 or 16 to 18"));
  EXPECT_THAT(message(Wrapped("\x30\x01\x38\x02\x7a\x04zzzz")),
              HasSubstr("has 4 bytes, expected 2 elements in fp32"));
  EXPECT_THAT(message(Wrapped("\x08" + std::string(10, '\x80') + "\x01")),
              HasSubstr("epoch is cut off or longer than 10 bytes"));
  EXPECT_THAT(message(Wrapped("\x30\x01") + "\x12"), HasSubstr("length must be that of the rest"));
  EXPECT_THAT(
      message("\x1a" + std::string("\x80\x80\x08\x12\xfc\xff\x07") + std::string(131068, 'x')),
      HasSubstr("65536 bytes at most"));
}

// 2^62 fp32 elements would take 0 bytes if the size were computed by a multiplication that
// overflows.
TEST(FrameCodecTest, OverflowingElementCountIsRefused) {
  ChunkFrame chunk;
  chunk.header.elems = uint64_t{1} << 62;
  EXPECT_THAT(std::string(Refusal(ToProto(chunk).SerializeAsString()).message()),
              HasSubstr("the payload has 0 bytes"));
}

// Computes sizes as docs/codecs.md states them, in a type too wide to overflow.
bool MayBePayload(int wire, unsigned __int128 elems, uint64_t bytes) {
  if (wire >= 1 && wire <= 4) return bytes == elems * SizeOf(static_cast<DType>(wire));
  if (elems > 0xffffffff) return false;
  if (wire == 16) return bytes == elems + 4 * ((elems + 255) / 256);
  if (wire == 17) return bytes == (elems + 7) / 8 + 4 * ((elems + 1023) / 1024);
  return wire == 18 && bytes >= 4 && bytes <= 4 + 5 * elems;
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
  if (!MayBePayload(chunk.wire(), chunk.elems(), chunk.payload().size())) return std::nullopt;
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
      "\x7a" + std::string(1, static_cast<char>(bytes)) + RandomBytes(random, bytes)};
  for (size_t extra = random() % 6; extra > 0; --extra) {
    std::string field;
    const uint64_t number = random() % 4 == 0 ? 1 + random() % 40 : 1 + random() % 9;
    const uint64_t type = random() % 5 == 0 ? random() % 8 : (number < 10 ? 0 : random() % 3);
    AppendVarint(number << 3 | type, &field);
    if (type == 0) AppendVarint(RandomValue(random), &field);
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
  switch (random() % 7) {
    case 0:
      return RandomBytes(random, random() % 40);
    case 1:
      return Flatten(EncodeOpen({random(), static_cast<uint32_t>(RandomValue(random)),
                                 static_cast<uint32_t>(RandomValue(random)),
                                 RandomBytes(random, random() % 3), RandomBytes(random, 1),
                                 static_cast<uint32_t>(RandomValue(random)), RandomValue(random)}));
    case 4:
      return Flatten(EncodeResumed({RandomValue(random)}));
    case 2:
      return Flatten(EncodeFailure(absl::AbortedError(RandomBytes(random, random() % 9))));
    case 3:
      return ToProto(RandomChunk(random, random() % 4)).SerializeAsString();
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
}  // namespace thalweg
