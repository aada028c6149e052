// These benchmarks compare the CUDA kernels of elements and blocks with a copy (bench_device.h).
// The bytes of a case are those of each input once and each output once.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/wire_format.h"
#include "kernels/cast/cast_cuda.h"
#include "kernels/codec/block_cuda.h"
#include "kernels/codec/topk/topk.h"
#include "kernels/codec/topk/topk_cuda.h"
#include "kernels/cuda/bench_device.h"
#include "kernels/reduce/reduce_cuda.h"

namespace thalweg {
namespace {

// Arrays have 256 MiB, several times as much as a GPU's cache.
constexpr uint64_t kElems = uint64_t{64} << 20;
constexpr uint64_t kChunkElems = uint64_t{1} << 18;
constexpr double kRatio = 0.01;
constexpr size_t kMostInputs = 8;

// Returns numbers around 1e-3 of either sign, like gradients.
DeviceArray<float> Gradient() {
  std::vector<float> values(kElems);
  uint64_t state = 1;
  for (float& value : values) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state >> 40) * 0x1p-24f - 0.5f;
    }
    value = sum * 1e-3f;
  }
  return DeviceArray<float>(std::span<const float>(values));
}

// Writes the gradient, in another type, over the beginning of each array.
void FillWith(const DeviceArray<float>& gradient, DType type,
              const std::vector<DeviceArray<float>>& arrays) {
  for (const DeviceArray<float>& array : arrays) {
    Require(CastOnDevice(nullptr, DType::kFloat32, gradient.get(), type, array.get(), kElems));
  }
  Require(cudaDeviceSynchronize(), "waiting for the GPU");
}

void BenchFolds(Bench& bench, const DeviceArray<float>& gradient, void* out, uint64_t* nonfinite) {
  const struct {
    DType in;
    DType out;
  } types[] = {{DType::kFloat32, DType::kFloat32},
               {DType::kFloat32, DType::kFloat16},
               {DType::kFloat16, DType::kFloat16},
               {DType::kBFloat16, DType::kBFloat16}};
  std::vector<DeviceArray<float>> arrays;
  std::vector<const void*> inputs;
  for (size_t k = 0; k < kMostInputs; ++k) {
    inputs.push_back(arrays.emplace_back(kElems).get());
  }
  for (auto [in, out_type] : types) {
    FillWith(gradient, in, arrays);
    for (size_t count = 2; count <= kMostInputs; count *= 2) {
      const std::vector<float> weights(count, 1.0f);
      const std::span<const void* const> used(inputs.data(), count);
      bench.Run(
          std::string("fold ") + Name(in) + " to " + Name(out_type) + " x" + std::to_string(count),
          kElems * (count * SizeOf(in) + SizeOf(out_type)),
          [&, in = in, type = out_type](CudaStream stream) {
            return FoldMeanOnDevice(stream, used, weights, static_cast<float>(count), in, type, out,
                                    kElems, nonfinite);
          });
    }
  }
}

void BenchCasts(Bench& bench, const void* in, void* out) {
  for (DType half : {DType::kFloat16, DType::kBFloat16}) {
    for (auto [from, to] : {std::pair{DType::kFloat32, half}, {half, DType::kFloat32}}) {
      bench.Run(std::string("cast ") + Name(from) + " to " + Name(to), kElems * 6,
                [&, from = from, to = to](CudaStream stream) {
                  return CastOnDevice(stream, from, in, to, out, kElems);
                });
    }
  }
}

void BenchBlockFormats(Bench& bench, const float* values, float* residual, float* decoded,
                       uint64_t* nonfinite) {
  for (const LossyTraits& traits : kLossyTraits) {
    if (traits.block_elems == 0) continue;
    const WireFormat format = traits.format;
    const uint64_t payload_bytes = MaxEncodedBytes(format, kElems);
    const DeviceArray<std::byte> payload(payload_bytes);
    const std::string name = traits.name;
    bench.Run(name + " encode with feedback", kElems * 12 + payload_bytes, [&](CudaStream stream) {
      return EncodeBlocksOnDevice(stream, format, values, residual, kElems, payload.get(),
                                  nonfinite);
    });
    bench.Run(name + " encode", kElems * 4 + payload_bytes, [&](CudaStream stream) {
      return EncodeBlocksOnDevice(stream, format, values, nullptr, kElems, payload.get(),
                                  nonfinite);
    });
    bench.Run(name + " decode", kElems * 4 + payload_bytes, [&](CudaStream stream) {
      return DecodeBlocksOnDevice(stream, format, payload.get(), kElems, decoded);
    });
  }
}

void BenchTopK(Bench& bench, const float* values, float* residual) {
  const DeviceArray<std::byte> out(MaxEncodedBytes(WireFormat::kTopK, kElems));
  const DeviceArray<std::byte> scratch(TopKScratchBytes(kElems));
  const DeviceArray<Encoded> encoded(1);
  for (uint64_t elems : {kElems, kChunkElems}) {
    const uint64_t count = TopKCount(kRatio, elems);
    const std::string name = "topk 1 % encode of " + std::to_string(elems) + " elements";
    bench.Run(name + " with feedback", elems * 12, [&](CudaStream stream) {
      return EncodeTopKOnDevice(stream, values, residual, elems, count, out.get(), encoded.get(),
                                scratch.get());
    });
    bench.Run(name, elems * 4, [&](CudaStream stream) {
      return EncodeTopKOnDevice(stream, values, nullptr, elems, count, out.get(), encoded.get(),
                                scratch.get());
    });
  }
}

void RunAll(int argc, char** argv) {
  Bench bench(argc, argv);
  const DeviceArray<float> values = Gradient();
  const DeviceArray<float> residual(kElems);
  const DeviceArray<float> out(kElems);
  const DeviceArray<uint64_t> nonfinite(1);
  // What writes more than it reads is nearer to this than to a copy.
  bench.Run("fill", out.bytes(), [&](CudaStream stream) {
    Require(cudaMemsetAsync(out.get(), 0, out.bytes(), stream), "a fill");
    return absl::OkStatus();
  });
  BenchFolds(bench, values, out.get(), nonfinite.get());
  BenchCasts(bench, values.get(), out.get());
  BenchBlockFormats(bench, values.get(), residual.get(), out.get(), nonfinite.get());
  BenchTopK(bench, values.get(), residual.get());
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) { thalweg::RunAll(argc, argv); }
