#include "server/sidecar/cuda/power_sgd_pair.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "core/base/protocol.h"

namespace thalweg {
namespace {

std::vector<std::byte> SentBy(BucketCodec& codec, const Part& part, Gradient& gradient) {
  std::vector<std::byte> sent;
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    const auto share = codec.Encode(part, chunk, gradient);
    EXPECT_TRUE(share.ok()) << share.status();
    if (share.ok()) sent.insert(sent.end(), share->begin(), share->end());
  }
  return sent;
}

}  // namespace

PowerSgdPair::PowerSgdPair(FakeGpus& gpus, CudaDevice& device, const BucketLayout& layout,
                           const std::vector<uint32_t>& members, const CodecSpec& spec,
                           uint32_t workers, PairStates& states)
    : set_(layout, members),
      spec_(spec),
      states_(states),
      gpu_(gpus, device, layout, workers),
      cpu_(layout, workers) {
  const CodecPlace place{{3}, kMinChunkBytes, 1};
  gpu_codec_ = *gpu_.memory().MakePowerSgd(set_, place, 4, layout.dtype, spec, states.gpu);
  cpu_codec_ = *cpu_.memory().MakePowerSgd(set_, place, 4, layout.dtype, spec, states.cpu);
}

void PowerSgdPair::Round(const std::vector<Floats>& gradients, const Tamper& tamper) {
  gpu_.Make(gradients);
  cpu_.Make(gradients);
  FoldPool pool(1);
  MemoryGradient gpu_gradient(gpu_.memory(), set_.layout().dtype);
  MemoryGradient cpu_gradient(cpu_.memory(), set_.layout().dtype);
  ASSERT_TRUE(gpu_.memory().BeginRound().ok());
  ASSERT_TRUE(cpu_.memory().BeginRound().ok());
  Part* cpu_part = *cpu_codec_->Begin(pool, cpu_gradient);
  absl::StatusOr<Part*> gpu_part = gpu_codec_->Begin(pool, gpu_gradient);
  ASSERT_TRUE(gpu_part.ok()) << gpu_part.status();
  while (cpu_part != nullptr) {
    ASSERT_NE(*gpu_part, nullptr);
    ASSERT_EQ((*gpu_part)->bucket.id.part, cpu_part->bucket.id.part);
    ASSERT_NO_FATAL_FAILURE(Exchange(*cpu_part, **gpu_part, cpu_gradient, gpu_gradient, tamper));
    cpu_part = *cpu_codec_->Next(pool, cpu_gradient);
    gpu_part = gpu_codec_->Next(pool, gpu_gradient);
    ASSERT_TRUE(gpu_part.ok()) << gpu_part.status();
  }
  ASSERT_EQ(*gpu_part, nullptr);
  ASSERT_TRUE(gpu_.memory().EndRound().ok());
  gpu_codec_->CountRound();
  cpu_codec_->CountRound();
  EXPECT_EQ(gpu_codec_->nonfinite_elems(), cpu_codec_->nonfinite_elems());
  EXPECT_EQ(gpu_codec_->gave_up(), cpu_codec_->gave_up());
  ExpectSameResults();
}

void PowerSgdPair::ExpectSameStates() {
  ASSERT_TRUE(gpu_codec_->SaveStates().ok());
  ASSERT_EQ(states_.gpu.size(), states_.cpu.size());
  for (const auto& [name, state] : states_.cpu) {
    const ParameterState& other = *states_.gpu.at(name);
    EXPECT_TRUE(SameBits(other.residual, state->residual)) << name;
    EXPECT_TRUE(SameBits(other.factor, state->factor)) << name;
    EXPECT_EQ(other.rounds, state->rounds) << name;
  }
}

void PowerSgdPair::Exchange(Part& cpu_part, Part& gpu_part, Gradient& cpu_gradient,
                            Gradient& gpu_gradient, const Tamper& tamper) {
  cpu_part.BeginRound();
  gpu_part.BeginRound();
  const std::vector<std::byte> sent = SentBy(*cpu_codec_, cpu_part, cpu_gradient);
  ExpectSameSent(cpu_part, sent, SentBy(*gpu_codec_, gpu_part, gpu_gradient));
  std::vector<std::byte> mean = sent;
  if (tamper != nullptr) tamper(cpu_part, mean);
  const size_t size = sent.size() / cpu_part.Elems();
  for (uint32_t chunk = 0; chunk < cpu_part.plan.Count(); ++chunk) {
    RoundResult result;
    result.id = {cpu_part.bucket.id, chunk, cpu_part.round};
    result.wire = cpu_part.bucket.wire;
    result.elems = cpu_part.plan.Elems(chunk);
    const auto bytes = std::span<const std::byte>(mean).subspan(cpu_part.plan.Begin(chunk) * size,
                                                                result.elems * size);
    // The result comes in pieces that end anywhere.
    result.payload.pieces = {bytes.first(bytes.size() / 3), bytes.subspan(bytes.size() / 3)};
    ASSERT_TRUE(cpu_codec_->Decode(cpu_part, result).ok());
    const absl::Status decoded = gpu_codec_->Decode(gpu_part, result);
    ASSERT_TRUE(decoded.ok()) << decoded;
  }
}

void PowerSgdPair::ExpectSameSent(const Part& part, const std::vector<std::byte>& cpu,
                                  const std::vector<std::byte>& gpu) {
  ASSERT_EQ(cpu.size(), gpu.size());
  if (part.bucket.id.part != 4) {
    EXPECT_EQ(cpu, gpu) << "part " << part.bucket.id.part;
    return;
  }
  const Floats cpu_values = Widened(cpu.data(), spec_.wire, part.Elems());
  const Floats gpu_values = Widened(gpu.data(), spec_.wire, part.Elems());
  uint64_t begin = 0;
  for (const TensorSpec& tensor : part.bucket.layout.tensors) {
    const auto of = [&](const Floats& values) {
      const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
      return Floats(first, first + static_cast<std::ptrdiff_t>(tensor.Elems()));
    };
    if (tensor.name.ends_with("/P")) {
      ExpectNear(tensor, of(cpu_values), of(gpu_values));
    } else {
      EXPECT_TRUE(SameBits(of(cpu_values), of(gpu_values))) << tensor.name;
    }
    begin += tensor.Elems();
  }
}

// An element of P is the product of a row of X, of m elements, and a column of Q, whose norm is 1
// at most up to rounding. In whatever order it is summed up, it is within m · u · ‖row‖ · ‖column‖
// of the true one, u = 2^-24 (and m · u small), so two are within twice that. Each may then have
// been rounded to fp16, by 2^-11 of it or half the spacing of its subnormal numbers, 2^-25.
void PowerSgdPair::ExpectNear(const TensorSpec& tensor, const Floats& cpu, const Floats& gpu) {
  const std::string name = tensor.name.substr(0, tensor.name.size() - 2);
  const std::span<const float> x = states_.cpu.at(name)->residual;  // in mid-round X itself
  const auto rows = static_cast<size_t>(tensor.shape[0]);
  const size_t rank = cpu.size() / rows;
  const size_t columns = x.size() / rows;
  for (size_t i = 0; i < cpu.size(); ++i) {
    double squares = 0;
    for (size_t j = 0; j < columns; ++j) {
      squares += static_cast<double>(x[i / rank * columns + j]) * x[i / rank * columns + j];
    }
    double allowed = 2.1 * static_cast<double>(columns) * 0x1p-24 * std::sqrt(squares);
    if (spec_.wire == DType::kFloat16) allowed += 2 * (0x1p-11 * std::abs(cpu[i]) + 0x1p-25);
    if (std::isfinite(cpu[i])) {
      ASSERT_NEAR(gpu[i], cpu[i], allowed) << tensor.name << ", element " << i;
    } else {
      ASSERT_FALSE(std::isfinite(gpu[i])) << tensor.name << ", element " << i;
    }
  }
}

void PowerSgdPair::ExpectSameResults() {
  const Floats gpu = gpu_.Result();
  const Floats cpu = cpu_.Result();
  for (const auto& piece : set_.TensorPieces(0, set_.Elems())) {
    const uint64_t begin = set_.BucketOffset(piece.tensor);
    EXPECT_EQ(std::memcmp(gpu.data() + begin, cpu.data() + begin, piece.elems * sizeof(float)), 0)
        << set_.layout().tensors[piece.tensor].name;
  }
}

}  // namespace thalweg
