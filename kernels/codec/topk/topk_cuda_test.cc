#include "kernels/codec/topk/topk_cuda.h"

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/codec/topk/topk_test_util.h"
#include "kernels/launch/test_device.h"

namespace thalweg::topk_cuda_test {
namespace {

using ::testing::HasSubstr;

// The payload begins `misalignment` bytes after a multiple of 256, and floats one element after it.
TopKResult OnDevice(const Floats& values, const Floats& residual, uint64_t count,
                    size_t misalignment) {
  const DeviceBuffer input(values, sizeof(float));
  const DeviceBuffer feedback(residual, sizeof(float));
  const DeviceBuffer out(MaxEncodedBytes(WireFormat::kTopK, values.size()), misalignment);
  const DeviceBuffer encoded(std::vector<uint64_t>{77, 77});
  const DeviceBuffer scratch(Bytes(TopKScratchBytes(values.size()), std::byte{0x5a}), 0);
  const absl::Status status = EncodeTopKOnDevice(
      nullptr, input.As<float>(), residual.empty() ? nullptr : feedback.As<float>(), values.size(),
      count, out.Data(), encoded.As<Encoded>(), scratch.Data());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(FinishDevice().ok());
  const std::vector<uint64_t> sizes = encoded.ContentAs<uint64_t>();
  TopKResult result{out.Content(), feedback.ContentAs<float>(), sizes[1]};
  EXPECT_LE(sizes[0], result.bytes.size());
  result.bytes.resize(std::min<size_t>(sizes[0], result.bytes.size()));
  return result;
}

void ExpectSameOnCpu(const Floats& values, const Floats& residual, uint64_t count,
                     size_t misalignment = 0) {
  ExpectSame(OnDevice(values, residual, count, misalignment),
             EncodeTopKOnCpu(values, residual, count));
}

class TopKOnDeviceTest : public DeviceTest {};

// The expected bytes are the worked example of docs/codecs.md.
TEST_F(TopKOnDeviceTest, EntriesAreTheDocumentedBytes) {
  Floats values(300);
  values[0] = 1;
  values[5] = -2;
  values[200] = 3;
  EXPECT_EQ(OnDevice(values, {}, 2, 0).bytes,
            BytesOf({0x02, 0x00, 0x00, 0x00, 0x05, 0x00, 0x00, 0x00, 0xc0, 0xc2, 0x01, 0x00, 0x00,
                     0x40, 0x40}));
}

TEST_F(TopKOnDeviceTest, EqualsTheCpuForAnySizeAndRatio) {
  std::mt19937_64 random(61);
  for (size_t elems : {0, 1, 2, 31, 33, 257, 1023, 1025, 5000, 9000}) {
    for (unsigned special_every : {0u, 10u, 1000u}) {
      const Floats values = RandomFloats(elems, special_every, random);
      const Floats before = RandomFloats(elems, special_every * 2, random);
      for (double ratio : {0.01, 0.3, 1.0}) {
        SCOPED_TRACE(testing::Message()
                     << elems << " elements, special " << special_every << ", ratio " << ratio);
        const uint64_t count = TopKCount(ratio, elems);
        ExpectSameOnCpu(values, {}, count);
        ExpectSameOnCpu(values, before, count, 1);
      }
    }
  }
}

TEST_F(TopKOnDeviceTest, OfManyEqualMagnitudesTheLowerIndicesGoFirst) {
  std::mt19937_64 random(62);
  for (int repeat = 0; repeat < 12; ++repeat) {
    Floats values(1 + random() % 6000);
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 7) - 3);
    ExpectSameOnCpu(values, {}, 1 + random() % values.size());
  }
}

// The magnitudes differ only in their lowest bits, so that every digit matters.
TEST_F(TopKOnDeviceTest, NeighbouringMagnitudesAreToldApart) {
  std::mt19937_64 random(63);
  Floats values(3000);
  for (float& value : values) {
    value = BitCast<float>(static_cast<uint32_t>(0x3f7ffc00u + random() % 2048));
  }
  for (uint64_t count : {1, 10, 1500, 2999, 3000}) ExpectSameOnCpu(values, {}, count);
}

TEST_F(TopKOnDeviceTest, ZerosNeverCrossAndEveryElementThatIsNotFiniteDoes) {
  ExpectSameOnCpu(Floats(2000), Floats(2000), 5);
  ExpectSameOnCpu({0, -0.0f, 0x1p-149f}, {}, 3);
  ExpectSameOnCpu({kNaN, 1, kInfinity, -kInfinity, 5}, {1, 2, 3, 4, 5}, 1);
  ExpectSameOnCpu({kNaN, 1, kInfinity, -kInfinity, 5}, {1, 2, 3, 4, 5}, 4);
  ExpectSameOnCpu(Floats(2000, kNaN), Floats(2000, 3), 7);
  ExpectSameOnCpu(Floats(1500, 3e38f), Floats(1500, 3e38f), 7);  // sums that overflow
}

// Many tiles have no entry, so that gaps take several bytes and reach over tiles.
TEST_F(TopKOnDeviceTest, GapsReachOverTiles) {
  Floats values(40000);
  for (size_t i : {3, 4, 150, 20000, 20129, 39999}) values[i] = static_cast<float>(i);
  for (uint64_t count : {1, 3, 6, 40000}) ExpectSameOnCpu(values, {}, count);
}

TEST_F(TopKOnDeviceTest, EntriesReadByTheHostAreScattered) {
  std::mt19937_64 random(64);
  for (size_t elems : {0, 1, 300, 3000}) {
    const Floats values = RandomFloats(elems, 20, random);
    const Bytes bytes = EncodeTopKOnCpu(values, {}, TopKCount(0.1, elems)).bytes;
    std::vector<uint32_t> indices;
    Floats entries;
    Floats expected(elems);
    for (TopKEntries entry{std::span(bytes)}; !entry.Done(); entry.Next()) {
      indices.push_back(static_cast<uint32_t>(entry.index()));
      entries.push_back(entry.value());
      expected[entry.index()] = entry.value();
    }
    const DeviceBuffer device_indices(indices);
    const DeviceBuffer device_entries(entries);
    const DeviceBuffer out(Floats(elems, 7));
    ASSERT_TRUE(ScatterTopKOnDevice(nullptr, device_indices.As<uint32_t>(),
                                    device_entries.As<float>(), indices.size(), out.As<float>(),
                                    elems)
                    .ok());
    ASSERT_TRUE(FinishDevice().ok());
    EXPECT_EQ(BitsOf(out.ContentAs<float>()), BitsOf(expected));
  }
}

TEST(TopKOnDeviceArgumentsTest, TooManyElementsAndNoCountAreRefused) {
  for (auto [elems, count] : {std::pair{kMaxLossyElems + 1, uint64_t{1}}, {uint64_t{9}, 0}}) {
    const absl::Status status =
        EncodeTopKOnDevice(nullptr, nullptr, nullptr, elems, count, nullptr, nullptr, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("got " + std::to_string(elems)));
  }
}

}  // namespace
}  // namespace thalweg::topk_cuda_test
