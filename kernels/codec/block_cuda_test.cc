#include "kernels/codec/block_cuda.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/lossy.h"
#include "kernels/codec/lossy_test_util.h"
#include "kernels/launch/test_device.h"

namespace thalweg::block_cuda_test {
namespace {

struct Result {
  Bytes bytes;
  Floats residual;
  uint64_t nonfinite = 0;
};

// A Shift says how far behind a multiple of 256 bytes arrays begin.
struct Shift {
  size_t floats;  // of floats, in elements
  size_t bytes;   // of payloads
};

std::vector<WireFormat> BlockFormats() {
  std::vector<WireFormat> formats;
  for (const LossyTraits& traits : kLossyTraits) {
    if (traits.block_elems != 0) formats.push_back(traits.format);
  }
  return formats;
}

class BlockFormatOnDeviceTest : public DeviceTest,
                                public ::testing::WithParamInterface<WireFormat> {
 protected:
  size_t EncodedBytes(size_t elems) const { return MaxEncodedBytes(GetParam(), elems); }

  // There is no feedback when `residual` is empty.
  Result OnCpu(const Floats& values, const Floats& residual) const {
    Result result{Bytes(EncodedBytes(values.size())), residual};
    float* const feedback = residual.empty() ? nullptr : result.residual.data();
    result.nonfinite =
        EncodeLossy(GetParam(), 0, values.data(), feedback, values.size(), result.bytes.data())
            .nonfinite_elems;
    return result;
  }

  Result OnDevice(const Floats& values, const Floats& residual, Shift shift) const {
    const DeviceBuffer input(values, shift.floats * sizeof(float));
    const DeviceBuffer feedback(residual, shift.floats * sizeof(float));
    const DeviceBuffer out(EncodedBytes(values.size()), shift.bytes);
    const DeviceBuffer nonfinite(std::vector<uint64_t>{7});
    const absl::Status status = EncodeBlocksOnDevice(
        nullptr, GetParam(), input.As<float>(), residual.empty() ? nullptr : feedback.As<float>(),
        values.size(), out.Data(), nonfinite.As<uint64_t>());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(FinishDevice().ok());
    return {out.Content(), feedback.ContentAs<float>(), nonfinite.ContentAs<uint64_t>()[0] - 7};
  }

  void ExpectSameEncoding(const Floats& values, const Floats& residual, Shift shift) const {
    const Result expected = OnCpu(values, residual);
    const Result got = OnDevice(values, residual, shift);
    ASSERT_EQ(got.bytes, expected.bytes);
    ASSERT_EQ(BitsOf(got.residual), BitsOf(expected.residual));
    ASSERT_EQ(got.nonfinite, expected.nonfinite);
  }

  void ExpectSameDecoding(const Bytes& bytes, size_t elems, Shift shift) const {
    Floats expected(elems);
    ASSERT_TRUE(
        DecodeLossy(Payload(bytes, nullptr), GetParam(), DType::kFloat32, elems, expected.data())
            .ok());
    const DeviceBuffer in(bytes, shift.bytes);
    const DeviceBuffer out(elems * sizeof(float), shift.floats * sizeof(float));
    const absl::Status status =
        DecodeBlocksOnDevice(nullptr, GetParam(), in.Data(), elems, out.As<float>());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(FinishDevice().ok());
    ASSERT_EQ(BitsOf(out.ContentAs<float>()), BitsOf(expected));
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, BlockFormatOnDeviceTest, ::testing::ValuesIn(BlockFormats()),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(BlockFormatOnDeviceTest, EncodingEqualsTheCpuForAnySizeAndAddress) {
  std::mt19937_64 random(51);
  for (size_t elems : kLossySizes) {
    for (unsigned special_every : {0u, 40u, 3000u}) {
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats before = RandomFloats(elems, special_every * 2, random);
      for (Shift shift : {Shift{0, 0}, {1, 3}, {4, 2}}) {
        SCOPED_TRACE(testing::Message() << elems << " elements, special " << special_every
                                        << ", shifts " << shift.floats << " " << shift.bytes);
        ExpectSameEncoding(values, {}, shift);
        ExpectSameEncoding(values, before, shift);
      }
    }
  }
}

TEST_P(BlockFormatOnDeviceTest, EncodingEqualsTheCpuForManyBlocks) {
  std::mt19937_64 random(52);
  const size_t elems = 20 * 1024 + 77;
  ExpectSameEncoding(RandomFloats(elems, 5000, random), RandomFloats(elems, 9000, random), {0, 0});
}

TEST_P(BlockFormatOnDeviceTest, EveryMagnitudeEqualsTheCpu) {
  Floats values;
  for (int exponent = -150; exponent <= 127; ++exponent) {
    for (int i = 0; i < 1024; ++i) {
      values.push_back(std::ldexp(1.0f + static_cast<float>(i) / 1024, exponent) *
                       (i % 2 == 0 ? 1 : -1));
    }
  }
  values.resize(values.size() + 1024, std::numeric_limits<float>::max());
  values.resize(values.size() + 1024, -0.0f);
  // The reference encodes part by part, as blocks of 1024 allow: all at once would be slow on the
  // emulator.
  for (size_t at = 0; at < values.size(); at += 40 * 1024) {
    const size_t end = std::min(values.size(), at + 40 * 1024);
    const Floats part(values.begin() + static_cast<ptrdiff_t>(at),
                      values.begin() + static_cast<ptrdiff_t>(end));
    ExpectSameEncoding(part, Floats(part.size()), {0, 0});
  }
}

TEST_P(BlockFormatOnDeviceTest, AnyBytesDecodeAsOnTheCpu) {
  std::mt19937_64 random(53);
  const float scales[] = {1, -0.1f, 0, -0.0f, 0x1p-149f, 3e38f, kInfinity, -kInfinity, kNaN};
  for (size_t elems : kLossySizes) {
    for (float scale : scales) {
      const size_t block = MaxEncodedBytes(GetParam(), FindLossy(GetParam())->block_elems);
      Bytes bytes(EncodedBytes(elems));
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      for (size_t at = 0; at < bytes.size(); at += block) std::memcpy(&bytes[at], &scale, 4);
      for (Shift shift : {Shift{0, 0}, {1, 1}}) {
        SCOPED_TRACE(testing::Message() << elems << " elements, scale " << scale);
        ExpectSameDecoding(bytes, elems, shift);
      }
    }
  }
}

// The expected bytes are the worked examples of docs/codecs.md.
class DocumentedBytesOnDeviceTest : public DeviceTest {
 protected:
  static Bytes Encode(WireFormat format, const Floats& values) {
    const DeviceBuffer input(values);
    const DeviceBuffer out(MaxEncodedBytes(format, values.size()));
    const DeviceBuffer nonfinite(std::vector<uint64_t>{0});
    EXPECT_TRUE(EncodeBlocksOnDevice(nullptr, format, input.As<float>(), nullptr, values.size(),
                                     out.Data(), nonfinite.As<uint64_t>())
                    .ok());
    return out.Content();
  }
};

TEST_F(DocumentedBytesOnDeviceTest, Int8) {
  EXPECT_EQ(Encode(WireFormat::kInt8,
                   {125, -125, 1, -1, 0.5f, 1.5f, 2.5f, -2.5f, kNaN, kInfinity, -kInfinity, 0}),
            BytesOf({0x00, 0x00, 0x80, 0x3f, 0x7d, 0x83, 0x01, 0xff, 0x00, 0x02, 0x02, 0xfe, 0x80,
                     0x7e, 0x82, 0x00}));
}

TEST_F(DocumentedBytesOnDeviceTest, OneBit) {
  EXPECT_EQ(
      Encode(WireFormat::kOneBit, {1, -1, 3, -3, 2, -2, 0, -0.0f, -4, 4, -2, 2, 1, -1, 3, -3}),
      BytesOf({0x00, 0x00, 0x00, 0x40, 0x2a, 0xa5}));
}

}  // namespace
}  // namespace thalweg::block_cuda_test
