// CpuPowerSgd is PowerSgd for gradients in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/powersgd/powersgd.h"
#include "server/sidecar/codec/power_sgd.h"

namespace thalweg {

class CpuPowerSgd final : public PowerSgd {
 public:
  // Sends parts `number` to `number` + 2; the whole one in `dense` type. Returns null when no
  // tensor shrinks enough. InvalidArgument names a tensor whose loaded state has another size.
  static absl::StatusOr<std::unique_ptr<CpuPowerSgd>> Create(TensorSet tensors,
                                                             const CodecPlace& place,
                                                             uint32_t number, DType dense,
                                                             const CodecSpec& spec,
                                                             ParameterStates& states);

  CompressionLoss loss() const override { return loss_; }

 private:
  // A Task is rows or columns [begin, end) of a matrix, or elements of a plain tensor.
  struct Task {
    uint32_t item = 0;
    bool is_matrix = false;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // Factors are a part that is computed here, in float32.
  struct Factors {
    std::vector<float> sent;         // this node's
    std::vector<float> mean;         // over all nodes
    std::vector<std::byte> encoded;  // `sent` in wire type; empty when that is float32
  };

  CpuPowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
              std::unique_ptr<DenseCodec> whole);
  void Allocate(Factors& factors, const Part& part) const;
  void MakeTasks();

  absl::Status Project(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<bool> ProjectTransposed(FoldPool& pool) override;
  absl::StatusOr<bool> IsQFinite() override { return AreFinite(q_.mean); }
  absl::StatusOr<uint64_t> Reconstruct(FoldPool& pool) override;
  absl::Status GiveUp(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> EncodeFactors(const Part& part, uint32_t chunk,
                                                           Gradient& gradient) override;
  absl::Status DecodeFactors(const Part& part, const RoundResult& received) override;

  absl::Status ProjectRows(const Task& task, Gradient& gradient);
  bool IsPFinite() const;  // every mean P
  // Returns how many results are not finite.
  uint64_t ReconstructRows(const Task& task, CompressionLoss* loss);

  Factors& Of(const Part& part) { return &part == first_.get() ? p_ : q_; }
  // Returns a task's rows of P, in the first part's values.
  std::span<float> P(std::vector<float>& first, const Task& task) const;
  // Returns a task's rows of the residual that the round leaves; until then those of the matrix.
  std::span<float> NextRows(const Task& task) const;
  FactorShape Shape(const Task& task) const;
  // Returns where a task's elements begin in the bucket, and how many they are.
  std::pair<uint64_t, uint64_t> Range(const Task& task) const;

  std::vector<Task> row_tasks_;     // matrices by rows, and plain tensors, in the bucket's order
  std::vector<Task> column_tasks_;  // matrices by columns
  Factors p_;                       // of the first part
  Factors q_;                       // of the second
  CompressionLoss loss_;
};

}  // namespace thalweg
