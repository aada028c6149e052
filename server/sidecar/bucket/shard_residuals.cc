#include "server/sidecar/bucket/shard_residuals.h"

#include <cstdint>
#include <vector>

#include "core/base/status_macros.h"

namespace thalweg {

absl::Status ReadShardResiduals(ShardGroup& shards, BucketCodec& codec, Duration timeout,
                                const std::function<void()>& alive) {
  const Part* part = codec.PartWithShardResiduals();
  if (part == nullptr || part->round == 0) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < part->plan.Count(); ++chunk) {
    THALWEG_ASSIGN_OR_RETURN(
        const std::vector<float> residual,
        shards.ReadResidual(part->shard_of_chunk[chunk], part->bucket.id, chunk, Now() + timeout));
    if (!residual.empty()) codec.KeepShardResidual(chunk, residual);
    alive();
  }
  return absl::OkStatus();
}

absl::Status WriteShardResiduals(ShardGroup& shards, BucketCodec& codec, const Part& part,
                                 Duration timeout) {
  if (codec.PartWithShardResiduals() != &part) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < part.plan.Count(); ++chunk) {
    const std::vector<float> residual = codec.ShardResidual(chunk);
    if (residual.empty()) continue;
    THALWEG_RETURN_IF_ERROR(shards.WriteResidual(part.shard_of_chunk[chunk], part.bucket.id, chunk,
                                                 residual, Now() + timeout));
  }
  codec.ForgetShardResiduals();
  return absl::OkStatus();
}

}  // namespace thalweg
