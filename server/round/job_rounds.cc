#include "server/round/job_rounds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {

JobRounds::JobRounds(const JoinRequest& first, const Members& members, bool keeps_snapshots)
    : spec_(first),
      members_(members),
      keeps_snapshots_(keeps_snapshots),
      layouts_(first.chunk_bytes, first.num_shards, first.num_nodes),
      engine_(MakeEngine({})),
      quorum_(first.num_nodes) {}

RoundEngine JobRounds::MakeEngine(std::vector<uint32_t> workers) const {
  return RoundEngine({members_.epoch(), spec_.num_nodes, flow_.window_chunks, spec_.round_timeout,
                      std::move(workers)});
}

absl::StatusOr<size_t> JobRounds::Begin(const FlowPlan& flow) {
  flow_ = flow;
  layouts_ = LayoutRegistry(flow.chunk_bytes, spec_.num_shards, spec_.num_nodes);
  engine_ = MakeEngine(members_.Workers());
  if (!spec_.resume) return 0;
  const absl::StatusOr<std::vector<RoundId>> complete = resumption_.Settle(spec_.num_nodes);
  if (absl::IsDataLoss(complete.status())) {
    return absl::DataLossError(
        absl::StrCat(complete.status().message(), "; ", LostWeights().message()));
  }
  THALWEG_RETURN_IF_ERROR(complete.status());
  for (const RoundId& id : *complete) {
    engine_.AllowPart(id.bucket.part);
    engine_.SetCompleted(id);
  }
  return complete->size();
}

void JobRounds::Release() {
  layouts_ = LayoutRegistry(flow_.chunk_bytes, spec_.num_shards, spec_.num_nodes);
  resumption_ = Resumption();
  engine_ = MakeEngine({});
  lone_ = LoneRounds();
  quorum_ = QuorumRounds(spec_.num_nodes);
  states_ = ChunkStates();
  settings_ = StepSettings();
}

absl::Status JobRounds::Register(uint32_t node, const BucketAnnouncement& bucket) {
  // A node that lacks the last results of a layout still uses it, when others have the next one.
  if (spec_.resume && layouts_.IsReplaced(bucket.id)) return absl::OkStatus();
  if (spec_.losses.min_nodes > 0 && bucket.update && bucket.update->quorum == 0) {
    return absl::InvalidArgumentError(
        "weights that are kept here need all nodes: the job cannot go on when one is lost "
        "(THALWEG_MIN_NODES)");
  }
  THALWEG_RETURN_IF_ERROR(layouts_.Register(members_.Name(node), bucket));
  engine_.AllowPart(bucket.id.part);
  lone_.DropOlderLayouts(bucket.id);
  quorum_.DropOlderLayouts(bucket.id);
  if (engine_.DropOlderLayouts(bucket.id) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(members_.Name(node), " announced bucket ", ToString(bucket.id),
                   " while a round of its earlier layout is open"));
}

absl::Status JobRounds::SetSettings(uint32_t node, uint64_t number, const UpdateStep& step) {
  const uint64_t series = number >> StepSettings::kSeriesBit;
  if (series == 0 || series == uint64_t{node} + 1) {
    return settings_.Set(members_.Name(node), number, step);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(members_.Name(node), " gives settings ", number, " of another node"));
}

absl::StatusOr<std::vector<uint32_t>> JobRounds::Supply(uint32_t node, const RoundResult& result,
                                                        uint64_t most_bytes) {
  const size_t bytes = result.payload.SizeBytes();
  // The epoch stays that of the joining when nodes are lost. In a pull no worker contributes, and
  // in a group only some do.
  if (result.epoch == epoch() && result.workers <= spec_.world_size && bytes <= most_bytes &&
      IsPayloadSize(result.wire, result.elems, bytes)) {
    return resumption_.Supply(node, result);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      members_.Name(node), " supplies a result of epoch ", result.epoch, " and ", result.workers,
      " workers with ", result.elems, " elements in ", bytes, " bytes, expected epoch ", epoch(),
      ", at most ", spec_.world_size, " workers, and the bytes of ", result.elems, " elements in ",
      Name(result.wire), ", at most ", most_bytes));
}

absl::Status JobRounds::CheckOneShot(uint32_t node, const Contribution& contribution) const {
  const uint64_t bytes = contribution.payload.SizeBytes();
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(contribution.id), ": ", why));
  };
  if (GroupOf(contribution.id) == 0) return refused("the job as a whole has buckets only");
  if (!IsDense(contribution.wire)) {
    return refused(absl::StrCat(Name(contribution.wire), " is for buckets only"));
  }
  if (contribution.collective == kPull) return refused("only buckets have weights to pull");
  if (!HasRightSize(node, contribution)) {
    return refused(absl::StrCat(members_.Name(node), " gives ", bytes, " bytes for ",
                                contribution.elems, " elements in ", Name(contribution.wire),
                                " to '", ToString(contribution.collective), "'"));
  }
  if (bytes <= flow_.chunk_bytes) return absl::OkStatus();
  return refused(absl::StrCat("chunks have at most ", flow_.chunk_bytes, " bytes, got ", bytes));
}

absl::StatusOr<JobRounds::Held> JobRounds::Hold(uint32_t node, Contribution contribution,
                                                TimePoint now, uint32_t backlog) {
  Held held;
  const RoundId id = contribution.id;
  if (resumption_.Ask(node, id, &held.missed)) return held;
  const uint64_t bytes = contribution.payload.SizeBytes();
  LayoutRegistry::Known known{{}, {{contribution.wire}, static_cast<double>(bytes)}};
  if (IsOneShot(id)) {
    THALWEG_RETURN_IF_ERROR(CheckOneShot(node, contribution));
  } else {
    THALWEG_ASSIGN_OR_RETURN(known, layouts_.Check(node, contribution));
  }
  const auto& [update, weight] = known;
  const Rule& rule = update.rule;
  const bool is_apart = rule != nullptr && rule->has_own_rounds();
  if (const absl::Status left = members_.CheckNoneLeft(); !is_apart && !left.ok()) {
    return absl::Status(left.code(),
                        absl::StrCat(ToString(id), " cannot complete: ", left.message()));
  }
  RoundResult contributed;  // without values
  contributed.id = id;
  contributed.epoch = contribution.epoch;
  contributed.elems = contribution.elems;
  const uint32_t ahead = rule == nullptr ? 0 : rule->ahead;
  auto added = is_apart && contribution.epoch == epoch()
                   ? AddApart(node, std::move(contribution), rule, now)
                   : engine_.Add(node, std::move(contribution), now, backlog, ahead);
  if (!added.ok()) {
    return absl::Status(added.status().code(),
                        absl::StrCat(members_.Name(node), ": ", added.status().message()));
  }
  Counted& counted = held.counted.emplace(Counted{weight, bytes, added->verdict, {}});
  if (is_apart && rule->quorum > 0 && added->verdict != RoundEngine::Verdict::kStale) {
    counted.late = added->late;
  }
  std::optional<uint64_t> least = added->late.answer;
  if (ahead > 0 && (added->completed || added->verdict == RoundEngine::Verdict::kHeld)) {
    least = id.round - std::min<uint64_t>(id.round, ahead);
  }
  if (least) {
    THALWEG_ASSIGN_OR_RETURN(held.asked, AskFor(node, contributed, *least, rule, weight.raw_bytes));
  }
  if (!added->completed) return held;
  if (ahead > 0) added->completed->results.clear();  // nodes get what they ask for
  THALWEG_ASSIGN_OR_RETURN(held.completed,
                           Complete(*std::move(added->completed), weight.raw_bytes, node, now));
  return held;
}

absl::StatusOr<RoundEngine::Added> JobRounds::AddApart(uint32_t node, Contribution contribution,
                                                       const Rule& rule, TimePoint now) {
  return rule->alone ? lone_.Add(node, members_.all()[node].workers, std::move(contribution))
                     : AddToQuorum(node, std::move(contribution), rule, now);
}

absl::StatusOr<RoundEngine::Added> JobRounds::AddToQuorum(uint32_t node, Contribution contribution,
                                                          const Rule& rule, TimePoint now) {
  THALWEG_ASSIGN_OR_RETURN(const std::shared_ptr<const UpdateStep> settings,
                           SettingsOf(contribution.id, contribution.settings));
  THALWEG_RETURN_IF_ERROR(CheckFits(*settings, *rule));
  return quorum_.Add({node, members_.all()[node].workers, window_of(node)}, std::move(contribution),
                     rule, *settings, now);
}

absl::StatusOr<Asked> JobRounds::AskFor(uint32_t node, const RoundResult& contributed,
                                        uint64_t least, Rule rule, double raw_bytes) const {
  const RoundId& id = contributed.id;
  auto state = states_.Find(id.bucket, id.chunk);
  if (state == nullptr) return NoWeights(id);
  return Asked{{node, id.round, least}, contributed, std::move(rule), std::move(state), raw_bytes};
}

absl::StatusOr<Completed> JobRounds::Complete(CompleteRound round, double raw_bytes, uint32_t node,
                                              TimePoint now) {
  const RoundId id = round.id;
  Completed completed{.round = std::move(round),
                      .state = nullptr,
                      .raw_bytes = raw_bytes,
                      .last_node = node,
                      .at = now};
  if (IsOneShot(id)) return completed;
  // Not when the layout is announced: the first node may still want to read and move them.
  if (id.round == 1) states_.DropOlderLayouts(id.bucket);
  completed.update = layouts_.UpdateOf(id.bucket, id.chunk);
  const bool has_residual = HasResidual(completed.round.wire);
  if (completed.update.rule == nullptr && !has_residual) return completed;
  const bool is_new = states_.Find(id.bucket, id.chunk) == nullptr;
  if (completed.update.rule != nullptr) {
    if (is_new) return NoWeights(id);
    if (const uint64_t number = completed.round.settings; number != 0) {
      THALWEG_ASSIGN_OR_RETURN(completed.step, SettingsOf(id, number));
      THALWEG_RETURN_IF_ERROR(CheckFits(*completed.step, *completed.update.rule));
    }
  }
  completed.state = StateOf(id.bucket, id.chunk, completed.round.elems);
  completed.has_lost_residual = is_new && has_residual && spec_.resume && id.round != 1;
  return completed;
}

absl::Status JobRounds::CompleteAll(RoundEngine::Removed removed, uint32_t node,
                                    const absl::Status& why, TimePoint now,
                                    std::vector<Completed>* completed) {
  if (!removed.impossible.empty()) {
    return absl::Status(why.code(), absl::StrCat(ToString(removed.impossible.front().id),
                                                 " cannot complete: ", why.message()));
  }
  for (CompleteRound& round : removed.completed) {
    const double raw_bytes = layouts_.WeightOf(round.id.bucket, round.elems).raw_bytes;
    THALWEG_ASSIGN_OR_RETURN(completed->emplace_back(),
                             Complete(std::move(round), raw_bytes, node, now));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Completed>> JobRounds::Lose(uint32_t node, const absl::Status& why,
                                                       TimePoint now) {
  std::vector<Completed> completed;
  THALWEG_RETURN_IF_ERROR(CompleteAll(engine_.Remove(node, now), node, why, now, &completed));
  THALWEG_RETURN_IF_ERROR(CompleteAll(quorum_.Remove(node, now), node, why, now, &completed));
  return completed;
}

absl::StatusOr<std::vector<Completed>> JobRounds::Leave(uint32_t node, TimePoint now) {
  const std::string& name = members_.Name(node);
  if (const auto open = engine_.OldestWaitingFor(node)) {
    const RoundId& id = open->id;
    return absl::AbortedError(
        IsOneShot(id) ? absl::StrCat(name, " left while ", ToString(id), " waited for it")
                      : absl::StrCat(name, " left while round ", id.round, " of bucket ",
                                     ToString(id.bucket), " waited for it"));
  }
  std::vector<Completed> completed;
  const absl::Status left = absl::AbortedError(absl::StrCat(name, " left"));
  THALWEG_RETURN_IF_ERROR(CompleteAll(quorum_.Remove(node, now), node, left, now, &completed));
  return completed;
}

absl::StatusOr<std::vector<Completed>> JobRounds::TakeRipe(TimePoint now) {
  std::vector<Completed> completed;
  auto ripe = quorum_.Ripe(now);
  if (ripe.empty()) return completed;
  const uint32_t node = ripe.front().answers.back().first;
  THALWEG_RETURN_IF_ERROR(
      CompleteAll({std::move(ripe), {}}, node, absl::OkStatus(), now, &completed));
  return completed;
}

std::vector<RoundEngine::OpenRound> JobRounds::Expired(TimePoint now) const {
  auto expired = engine_.Expired(now);
  return expired.empty() ? quorum_.Expired(now, spec_.round_timeout) : expired;
}

std::optional<RoundEngine::OpenRound> JobRounds::Oldest() const {
  auto oldest = engine_.Oldest();
  auto other = quorum_.Oldest();
  return other && (!oldest || other->opened < oldest->opened) ? other : oldest;
}

std::shared_ptr<ChunkState> JobRounds::StateOf(BucketId bucket, uint32_t chunk, uint64_t elems) {
  if (auto known = states_.Find(bucket, chunk); known != nullptr) return known;
  return states_.Get(bucket, chunk, elems, layouts_.Padding(bucket, chunk),
                     layouts_.StateBytesPerElem(bucket));
}

uint64_t JobRounds::state_bytes() const {
  // This shard may sum more than its equal part, which is all that can be told in advance.
  return std::max(layouts_.state_bytes(), states_.bytes());
}

absl::StatusOr<std::shared_ptr<const UpdateStep>> JobRounds::SettingsOf(const RoundId& id,
                                                                        uint64_t number) const {
  if (auto found = settings_.Find(number)) return found;
  if (spec_.resume) return LostWeights();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(id), " names settings ", number, ", which are not known"));
}

absl::Status JobRounds::NoWeights(const RoundId& id) const {
  if (spec_.resume) return LostWeights();
  return absl::FailedPreconditionError(
      absl::StrCat(ToString(id), ": the shard has no weights to update: nobody has written them"));
}

absl::Status JobRounds::LostWeights() const {
  return absl::DataLossError(absl::StrCat(
      "aggregator shard ", spec_.shard, " was restarted and has lost the weights that it kept",
      keeps_snapshots_
          ? ""
          : "; to go back to a snapshot when that happens, start the aggregators with --state-dir, "
            "and make the ServerOptimizer with snapshot_every"));
}

}  // namespace thalweg
