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
// is left out. Here is what is the same wherever gradients lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/codec_spec.h"
#include "server/sidecar/codec/bucket_codec.h"
#include "server/sidecar/codec/dense_codec.h"
#include "server/sidecar/codec/parameter_states.h"

namespace thalweg {

class PowerSgd : public BucketCodec {
 public:
  std::string name() const final { return spec_.Name(); }
  bool HasStarted() const final;
  void CountRound() final;
  uint64_t rounds() const final { return matrices_[0].state->rounds; }
  Part* FindPart(uint32_t number) final;
  absl::StatusOr<Part*> Begin(FoldPool& pool, Gradient& gradient) final;
  absl::StatusOr<std::span<const std::byte>> Encode(const Part& part, uint32_t chunk,
                                                    Gradient& gradient) final;
  absl::Status Decode(const Part& part, const RoundResult& received) final;
  bool EndsWith(const Part& /*part*/) const final { return false; }
  bool MayFollow(const Part& part) const final;
  absl::StatusOr<Part*> Next(FoldPool& pool, Gradient& gradient) final;
  uint64_t nonfinite_elems() const final { return nonfinite_elems_; }
  bool gave_up() const final { return step_ == Step::kWhole; }
  std::span<const std::shared_ptr<ParameterState>> States() const final { return states_; }

 protected:
  struct Matrix {
    size_t tensor = 0;        // its number in the set
    uint64_t offset = 0;      // of its first element in the bucket
    uint64_t set_offset = 0;  // the same in the set
    uint64_t rows = 0;
    uint64_t columns = 0;
    uint32_t rank = 0;
    uint64_t p_offset = 0;  // of its P in the first part
    uint64_t q_offset = 0;  // of its Q in the second
    uint64_t name_hash = 0;
    std::shared_ptr<ParameterState> state;

    uint64_t QElems() const { return rank * columns; }
  };
  // A tensor that crosses the network as it is, in the first part.
  struct Plain {
    uint64_t offset = 0;      // in the bucket
    uint64_t set_offset = 0;  // in the set
    uint64_t elems = 0;
    uint64_t sent_offset = 0;  // in the first part
  };

  // Sends parts `number` and `number` + 1, and that of `whole`, whose number is the next.
  PowerSgd(TensorSet tensors, const CodecPlace& place, uint32_t number, const CodecSpec& spec,
           std::unique_ptr<DenseCodec> whole);
  // To be called once. False: none of the tensors has enough to gain, and the codec is of no use.
  // InvalidArgument names a tensor whose state, which somebody has loaded, is of another size.
  absl::StatusOr<bool> TakeTensors(ParameterStates& states);

  // Makes the factors of the states the orthonormal Q with which a round begins.
  absl::Status PrepareFactors(FoldPool& pool);
  static bool AreFinite(std::span<const float> values);
  // Keeps `factor` for the next round, or nothing if it is not finite.
  static void KeepFactor(const Matrix& matrix, std::span<const float> factor);
  // Returns whether the second part's round is one whose loss is measured.
  bool IsSampled() const { return second_->round % kSampleEvery == 1; }  // rounds count from 1

  // The steps of a round: what the first part sends; what the second one sends, and whether all of
  // the mean P is finite, without which it is sent only where decides_late_; whether all of the
  // mean Q is; the result, and how many of the matrices' elements in it are not finite; or, instead
  // of that, giving up: residual and factor become what they were before the round.
  virtual absl::Status Project(FoldPool& pool, Gradient& gradient) = 0;
  virtual absl::StatusOr<bool> ProjectTransposed(FoldPool& pool) = 0;
  virtual absl::StatusOr<bool> IsQFinite() = 0;
  virtual absl::StatusOr<uint64_t> Reconstruct(FoldPool& pool) = 0;
  virtual absl::Status GiveUp(FoldPool& pool, Gradient& gradient) = 0;
  // Encode and Decode of the first and the second part.
  virtual absl::StatusOr<std::span<const std::byte>> EncodeFactors(const Part& part, uint32_t chunk,
                                                                   Gradient& gradient) = 0;
  virtual absl::Status DecodeFactors(const Part& part, const RoundResult& received) = 0;

  const CodecSpec spec_;  // with the wire of this bucket
  // Q of a tall matrix has larger elements than the matrix and P have: whether fp16 can have it is
  // known when it has come. Where the codec's buckets may have that wire, all of them decide there
  // to give up, so that what is sent whole has one order on all nodes: that of the second parts.
  const bool decides_late_;
  std::vector<Matrix> matrices_;
  std::vector<Plain> plains_;
  std::vector<std::shared_ptr<ParameterState>> states_;  // by tensor; null for plain tensors
  // The parts' values are float32 before they are encoded.
  std::unique_ptr<Part> first_;
  std::unique_ptr<Part> second_;

 private:
  enum class Step { kFirst, kSecond, kWhole };  // which part is in flight, or was the last

  absl::Status Add(size_t tensor, uint64_t set_offset, ParameterStates& states);
  void MakeParts();
  const uint32_t number_;
  const std::unique_ptr<DenseCodec> whole_;
  Step step_ = Step::kFirst;
  bool is_p_finite_ = true;  // of this round
  uint64_t nonfinite_elems_ = 0;
};

}  // namespace thalweg
