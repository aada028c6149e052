// PowerSGD of one bucket's tensors on one node, after its workers' shares have been folded: every
// matrix M that has enough to gain crosses the network as two thin factors (Vogels, Karimireddy,
// Jaggi: PowerSGD, NeurIPS 2019; docs/compression.md says where torch's hook differs).
//
//   M = gradient + what earlier rounds left out
//   first part    [tensors that are not compressed | P = M·Q of each matrix]  → their means
//   second part   [Q = Mᵀ·P̂ of each matrix], P̂ = P orthogonalised            → their means
//   result        P̂·Qᵀ; M − P̂·Qᵀ is left for the next round
//   whole part    all tensors, instead of the second part in a round whose mean P is not finite:
//                 the optimizer gets what it would without compression. All nodes see the same P,
//                 so all do this.
//
// A gradient is passed over three times: once for M and P, once for Q, once for the result and what
// is left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/codec_spec.h"
#include "kernels/codec/powersgd.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/cast_codec.h"
#include "server/sidecar/codec/parameter_states.h"

namespace thalweg {

class PowerSgd final : public BucketCodec {
 public:
  // Sends parts `number` to `number` + 2; the whole one in `dense` type. Null when none of the
  // tensors has enough to gain. InvalidArgument names a tensor whose state, which somebody has
  // loaded, is of another size.
  static absl::StatusOr<std::unique_ptr<PowerSgd>> Create(TensorSet tensors,
                                                          const CodecPlace& place, uint32_t number,
                                                          DType dense, const CodecSpec& spec,
                                                          ParameterStates& states);

  std::string name() const override { return spec_.Name(); }
  bool HasStarted() const override;
  void CountRound() override;
  uint64_t rounds() const override { return matrices_[0].state->rounds; }
  Part* FindPart(uint32_t number) override;
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) override;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) override;
  absl::Status Decode(const Part& part, const RoundResult& received) override;
  bool EndsWith(const Part& /*part*/) const override { return false; }
  absl::StatusOr<Part*> Next(FoldPool& pool, Gradient& gradient) override;
  uint64_t nonfinite_elems() const override { return nonfinite_elems_; }
  bool gave_up() const override { return step_ == Step::kWhole; }
  CompressionLoss loss() const override { return loss_; }

 private:
  // A piece of work: rows or columns [begin, end) of a matrix, or elements of a plain tensor.
  struct Task {
    uint32_t item = 0;
    bool is_matrix = false;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  struct Matrix {
    uint64_t offset = 0;  // of its first element in the bucket
    uint64_t rows = 0;
    uint64_t columns = 0;
    uint32_t rank = 0;
    uint64_t p_offset = 0;  // of its P in the first part
    uint64_t q_offset = 0;  // of its Q in the second
    uint64_t name_hash = 0;
    std::shared_ptr<ParameterState> state;

    FactorShape Shape(const Task& task) const;
    std::span<float> Rows(const Task& task) const;  // of state->residual
  };
  // A tensor that crosses the network as it is, in the first part.
  struct Plain {
    uint64_t offset = 0;  // in the bucket
    uint64_t elems = 0;
    uint64_t sent_offset = 0;  // in the first part
  };
  enum class Step { kFirst, kSecond, kWhole };  // which part is in flight, or was the last

  PowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, DType dense,
           const CodecSpec& spec);
  absl::Status Add(size_t tensor, ParameterStates& states);
  void MakeParts();
  void MakeTasks();

  absl::Status PrepareFactors(FoldPool& pool);
  absl::Status ProjectRows(const Task& task, Gradient& gradient);
  bool IsFinite() const;  // every mean P
  absl::Status ProjectTransposed(FoldPool& pool);
  absl::Status Reconstruct(FoldPool& pool);
  // Returns how many results are not finite.
  uint64_t ReconstructRows(const Task& task, CompressionLoss* loss);
  // Leaves no trace of the round.
  absl::Status GiveUp(FoldPool& pool, Gradient& gradient);

  // A task's rows of P, in the first part's values.
  std::span<float> P(std::vector<float>& first, const Task& task) const;
  // Where a task's elements begin in the bucket, and how many they are.
  std::pair<uint64_t, uint64_t> Range(const Task& task) const;

  const CodecSpec spec_;
  const uint32_t number_;
  std::vector<Matrix> matrices_;
  std::vector<Plain> plains_;
  std::vector<Task> row_tasks_;     // matrices by rows, and plain tensors, in the bucket's order
  std::vector<Task> column_tasks_;  // matrices by columns

  // A part that consists of what is computed here, in float32.
  struct Factors {
    std::unique_ptr<Part> part;
    std::vector<float> sent;         // this node's
    std::vector<float> mean;         // over all nodes
    std::vector<std::byte> encoded;  // `sent` in wire type; empty when that is float32
  };
  Factors first_;
  Factors second_;
  CastCodec whole_;
  Step step_ = Step::kFirst;
  uint64_t nonfinite_elems_ = 0;
  CompressionLoss loss_;
};

}  // namespace thalweg
