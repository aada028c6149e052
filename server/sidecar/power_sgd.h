// PowerSGD of one bucket on one node, after its workers' shares have been folded: every matrix M of
// the bucket that has enough to gain crosses the network as two thin factors (Vogels, Karimireddy,
// Jaggi: PowerSGD, NeurIPS 2019; docs/compression.md says where torch's hook differs).
//
//   M = gradient + what earlier rounds left out
//   part 1   [tensors that are not compressed | P = M·Q of each matrix]  → their means
//   part 2   [Q = Mᵀ·P̂ of each matrix], P̂ = P orthogonalised            → their means
//   result   P̂·Qᵀ; M − P̂·Qᵀ is left for the next round
//   part 3   the whole bucket, instead of part 2 in a round whose mean P is not finite: the
//            optimizer gets what it would without compression. All nodes see the same P, so all
//            do this.
//
// A gradient is passed over three times: once for M and P, once for Q, once for the result and what
// is left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/codec_spec.h"
#include "core/base/layout.h"
#include "kernels/codec/powersgd.h"
#include "server/sidecar/device/device.h"
#include "server/sidecar/fold_pool.h"
#include "server/sidecar/matrix_states.h"
#include "server/sidecar/part.h"

namespace thalweg {

// What a round of compression did not get across, as squared norms over all matrices of a bucket.
struct CompressionLoss {
  double residual = 0;  // what is left for later
  double whole = 0;     // what was to be sent
};

// The node's gradient, folded over its workers, in float32.
class GradientSource {
 public:
  virtual ~GradientSource() = default;
  // Waits until elements up to `end` of the bucket are there.
  virtual absl::Status WaitFor(uint64_t end) = 0;
  // Elements [begin, begin + elems): a view of the arena, or else put into `tile`.
  virtual const float* Read(uint64_t begin, uint64_t elems, std::vector<float>& tile) = 0;
};

// Thread-compatible, and guarded like the NodeBucket that it belongs to. The steps of a round are
// Project, ProjectTransposed, Reconstruct, or, instead of the last two, GiveUp.
class PowerSgd {
 public:
  // For a bucket whose dense part is `dense`, which must outlive this. Null when none of its
  // tensors has enough to gain. InvalidArgument names a tensor whose state, which somebody has
  // loaded, is of another size.
  static absl::StatusOr<std::unique_ptr<PowerSgd>> Create(const Part& dense, const CodecSpec& spec,
                                                          uint64_t chunk_bytes, uint32_t num_shards,
                                                          MatrixStates& states);

  // Whether the next round is to be compressed.
  bool HasStarted() const;
  void CountRound();

  Part& first() { return *first_; }
  Part& second() { return *second_; }
  Part& whole() { return *whole_; }
  // 1, 2 or 3; null for others.
  Part* FindPart(uint32_t number);

  // Computes first().send.
  absl::Status Project(FoldPool& pool, Device& device, GradientSource& gradient);
  // After first() has come: whether it can be gone on with, that is, every P is finite.
  bool IsFinite() const;
  // Computes second().send.
  absl::Status ProjectTransposed(FoldPool& pool, Device& device);
  // After second() has come: writes the whole result, in the bucket's type, into `result`. Returns
  // how many of its elements are not finite.
  absl::StatusOr<uint64_t> Reconstruct(FoldPool& pool, Device& device, std::byte* result);
  // Of the last round that was sampled: the first one, and then one in kSampleEvery.
  const CompressionLoss& loss() const { return loss_; }
  // After whole() has come instead: leaves no trace of the round.
  absl::Status GiveUp(FoldPool& pool, GradientSource& gradient);

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
    std::shared_ptr<MatrixState> state;

    FactorShape Shape(const Task& task) const;
    std::span<float> Rows(const Task& task) const;  // of state->residual
  };
  // A tensor that crosses the network as it is, in the first part.
  struct Plain {
    uint64_t offset = 0;  // in the bucket
    uint64_t elems = 0;
    uint64_t sent_offset = 0;  // in the first part
  };
  PowerSgd(const Part& dense, const CodecSpec& spec);
  absl::Status Add(const TensorSpec& tensor, uint64_t offset, MatrixStates& states);
  void MakeParts(uint64_t chunk_bytes, uint32_t num_shards);
  void MakeTasks();
  absl::Status PrepareFactors(FoldPool& pool);
  absl::Status ProjectRows(const Task& task, GradientSource& gradient);
  // Brings `values` into wire type, if that is another.
  absl::Status EncodePart(FoldPool& pool, Device& device, const Part& part,
                          const std::vector<float>& values, std::vector<std::byte>& encoded);
  // A task's rows of P, in the first part's values.
  std::span<float> P(std::vector<float>& first, const Task& task) const;
  // Where a task's elements begin in the bucket, and how many they are.
  std::pair<uint64_t, uint64_t> Range(const Task& task) const;

  static constexpr uint64_t kSampleEvery = 100;

  bool IsSampled() const;

  const Part& dense_;
  const CodecSpec spec_;
  std::vector<Matrix> matrices_;
  std::vector<Plain> plains_;
  std::vector<Task> row_tasks_;     // matrices by rows, and plain tensors, in the bucket's order
  std::vector<Task> column_tasks_;  // matrices by columns

  std::unique_ptr<Part> first_;
  std::unique_ptr<Part> second_;
  std::unique_ptr<Part> whole_;
  std::vector<float> first_sent_;  // this node's, and the means, in float32
  std::vector<float> first_mean_;
  std::vector<float> second_sent_;
  std::vector<float> second_mean_;
  std::vector<std::byte> first_encoded_;  // empty when the wire type is float32
  std::vector<std::byte> second_encoded_;
  CompressionLoss loss_;
};

}  // namespace thalweg
