// Layouts of buckets as peers announce them, and how nodes and shards cut these into chunks: every
// element is in one chunk, and layouts that agree have one fingerprint. The first bytes choose
// type, format, size of chunks and number of shards; then each tensor is a byte of name and one or
// two dimensions.

#include <string>

#include "core/base/fuzzing.h"
#include "core/base/layout.h"
#include "core/base/protocol.h"
#include "core/base/update.h"

namespace thalweg {
namespace {

constexpr uint64_t kMostElems = uint64_t{1} << 48;  // as the parsers of both formats allow

// The input's bytes end one day; a tensor takes four of them at least.
BucketLayout TakeLayout(FuzzInput& input, DType dtype) {
  BucketLayout layout{dtype, {}};
  while (!input.IsEmpty()) {
    TensorSpec tensor{input.Text(1), {static_cast<int64_t>(input.Short())}};
    if (const uint8_t more = input.Byte(); more % 2 == 1) {
      tensor.shape.push_back(static_cast<int64_t>(input.Word() >> (more / 8)));
    }
    if (layout.Elems() + tensor.Elems() > kMostElems) break;
    layout.tensors.push_back(std::move(tensor));
  }
  return layout;
}

void CheckChunk(const ChunkPlan& plan, uint32_t chunk) {
  const uint64_t begin = plan.Begin(chunk);
  const uint64_t end = plan.Begin(chunk + 1);
  Promise(begin < end, "no chunk is empty");
  Promise(plan.ChunkOf(begin) == chunk && plan.ChunkOf(end - 1) == chunk,
          "a chunk has its first and last element");
}

void CheckPlan(const ChunkPlan& plan) {
  const uint32_t count = plan.Count();
  Promise(plan.Begin(0) == 0 && plan.Begin(count) == plan.total_elems, "chunks are all elements");
  constexpr uint32_t kChecked = 64;  // at each end
  for (uint32_t chunk = 0; chunk < std::min(count, kChecked); ++chunk) CheckChunk(plan, chunk);
  for (uint32_t k = 1; k <= std::min(count, kChecked); ++k) CheckChunk(plan, count - k);
}

void CheckAgreement(const BucketLayout& layout) {
  BucketLayout other = layout;
  Promise(CheckSameLayout({}, layout, "a", other, "b").ok(), "equal layouts agree");
  Promise(layout.Fingerprint() == other.Fingerprint(), "equal layouts have one fingerprint");
  if (layout.tensors.empty()) return;
  other.tensors.back().shape.push_back(1);
  const absl::Status differs = CheckSameLayout({}, layout, "a", other, "b");
  Promise(absl::IsInvalidArgument(differs), "layouts that differ are refused");
  Promise(layout.Fingerprint() != other.Fingerprint(), "other shapes have other fingerprints");
}

void Run(FuzzInput input) {
  constexpr auto kFormats = std::to_array(
      {WireFormat::kFloat32, WireFormat::kInt8, WireFormat::kOneBit, WireFormat::kTopK});
  const auto dtype = static_cast<DType>(1 + input.Byte() % 9);
  const WireFormat wire = kFormats[input.Byte() % kFormats.size()];
  const uint64_t chunk_bytes =
      kMinChunkBytes + (uint64_t{input.Short()} << 6) % (kMaxChunkBytes - kMinChunkBytes + 1);
  const uint32_t num_shards = 1 + input.Short() % kMaxShards;
  const BucketLayout layout = TakeLayout(input, dtype);
  CheckAgreement(layout);
  // The protocols bound a bucket's elements, and a chunk's number has 32 bits.
  if (layout.Elems() <= uint64_t{1} << 40) {
    CheckPlan(ChunkPlan::For(layout.Elems(), dtype, wire, chunk_bytes, num_shards));
  }
  if (layout.Elems() <= uint64_t{1} << 24) {
    CheckPlan(PlanOfUpdated(layout, wire, chunk_bytes, num_shards));
  }
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Run(thalweg::FuzzInput(data, size));
  return 0;
}
