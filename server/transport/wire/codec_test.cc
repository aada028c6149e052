#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "server/transport/wire/control_codec.h"
#include "server/transport/wire/losses_codec.h"
#include "server/transport/wire/status_codec.h"
#include "server/transport/wire/update_codec.h"

namespace thalweg::codec_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(StatusCodecTest, EveryCodeKeepsItsMeaningAndMessage) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "bucket 3 is late");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
  EXPECT_TRUE(FromGrpc(ToGrpc(absl::OkStatus())).ok());
  EXPECT_EQ(ToGrpc(absl::DataLossError("")).error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(ToGrpc(absl::AlreadyExistsError("")).error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST(StatusCodecTest, CodesThatDoNotExistBecomeUnknown) {
  EXPECT_EQ(StatusFromWire(17, "x"), absl::UnknownError("x"));
  EXPECT_EQ(StatusFromWire(0xffffffffu, "x"), absl::UnknownError("x"));
}

TEST(PulseCodecTest, LostNodesArriveWithReasonsThatAreCutAndCannotForgeALog) {
  const std::string why(100000, 'x');
  const Pulse sent{{"a boot", -5}, {{"node 1 (x)", why}, {"node 2 (y)", "is gone"}}};
  v1::HeartbeatResponse proto = ToProto(sent);
  EXPECT_EQ(proto.lost(0).why().size(), kMaxLostBytes);
  proto.mutable_lost(1)->set_node("node 2\nnode 3");
  const Pulse received = FromProto(proto);
  ASSERT_EQ(received.lost.size(), 2u);
  EXPECT_EQ(received.clock.nanos, -5);
  EXPECT_EQ(received.lost[0].node, "node 1 (x)");
  EXPECT_EQ(received.lost[1].node, "node 2\\nnode 3");
  EXPECT_EQ(received.lost[1].why, "is gone");
}

TEST(StatusCodecTest, LongMessagesAreCut) {
  const grpc::Status status = ToGrpc(absl::InternalError(std::string(100000, 'x')));
  EXPECT_EQ(status.error_message().size(), kMaxReasonBytes);
  EXPECT_EQ(StatusFromWire(10, std::string(8 << 20, 'x')).message().size(), kMaxReasonBytes);
}

TEST(StatusCodecTest, MessagesCannotForgeLinesOfALog) {
  const char forged[] = "x\n12:00:00.000 error: \x1b[2K";
  EXPECT_EQ(StatusFromWire(10, "x\n12:00:00.000 error: \x1b[2K"),
            absl::AbortedError("x\\n12:00:00.000 error: \\x1b[2K"));
  EXPECT_EQ(ToGrpc(absl::AbortedError(forged)).error_message(), "x\\n12:00:00.000 error: \\x1b[2K");
}

TEST(ControlCodecTest, ForeignVersionsAreRefusedNamingBoth) {
  v1::JoinRequest proto = ToProto(JoinRequest{});
  proto.set_min_wire_version(kWireVersion + 1);
  proto.set_max_wire_version(kWireVersion + 4);
  EXPECT_THAT(
      Message(FromProto(proto).status()),
      AllOf(HasSubstr(absl::StrCat("versions ", kWireVersion + 1, " to ", kWireVersion + 4)),
            HasSubstr(absl::StrCat("aggregator speaks ", kWireVersion))));
  proto.set_min_wire_version(1);
  proto.set_max_wire_version(kWireVersion - 1);
  EXPECT_THAT(Message(FromProto(proto).status()),
              AllOf(HasSubstr(absl::StrCat("versions 1 to ", kWireVersion - 1)),
                    HasSubstr(absl::StrCat("aggregator speaks ", kWireVersion))));
  proto.set_min_wire_version(0);
  proto.set_max_wire_version(0);
  EXPECT_EQ(FromProto(proto).status().code(), absl::StatusCode::kInvalidArgument);
  proto.set_max_wire_version(9);
  EXPECT_TRUE(FromProto(proto).ok());
}

TEST(ControlCodecTest, GraceTravelsWithJoin) {
  JoinRequest request;
  request.grace = std::chrono::seconds(60);
  request.losses = {3, std::chrono::milliseconds(2500)};
  EXPECT_EQ(FromProto(ToProto(request))->grace, request.grace);
  EXPECT_EQ(FromProto(ToProto(request))->losses, request.losses);
}

TEST(ControlCodecTest, UnusableJoinFieldsAreRefused) {
  v1::JoinRequest proto = ToProto(JoinRequest{});
  proto.set_codec("zip");
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("codec 'zip'"));
  proto = ToProto(JoinRequest{});
  proto.set_round_timeout_ms(~uint64_t{0});
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("expected at most 86400000"));
  proto = ToProto(JoinRequest{});
  proto.set_grace_ms(3'600'001);
  EXPECT_THAT(Message(FromProto(proto).status()),
              HasSubstr("grace_ms is 3600001, expected at most"));
  proto = ToProto(JoinRequest{});
  proto.set_link_round_trip_us(~uint64_t{0});
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("expected at most 3600000000"));
}

TEST(ControlCodecTest, LayoutsRoundTrip) {
  const BucketLayout layout{DType::kBFloat16, {{"w", {3, 4}}, {"scalar", {}}, {"none", {0, 9}}}};
  const v1::RegisterBucketRequest proto =
      ToProto(7, {{2, 1, 3}, layout, WireFormat::kBFloat16, 9, 48});
  EXPECT_EQ(proto.token(), 7u);
  EXPECT_EQ(proto.bucket().generation(), 1u);
  EXPECT_EQ(proto.placement(), 9u);
  const auto back = FromProto(proto);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->id, (BucketId{2, 1, 3}));
  EXPECT_EQ(back->layout, layout);
  EXPECT_EQ(back->wire, WireFormat::kBFloat16);
  EXPECT_EQ(back->placement, 9u);
  EXPECT_EQ(back->raw_bytes, 48u);
}

TEST(ControlCodecTest, UpdatesRoundTripAndUnknownOnesAreRefused) {
  BucketAnnouncement bucket{{2, 1, 0}, {DType::kFloat32, {{"w", {3}}, {"b", {1}}}}};
  EXPECT_EQ(FromProto(ToProto(7, bucket))->update, std::nullopt);
  UpdateRule adam;
  adam.optimizer = Optimizer::kAdam;
  adam.decoupled = true;
  adam.maximize = true;
  adam.groups = {1, 0};
  adam.down = WireFormat::kBFloat16;
  adam.ahead = 8;
  UpdateRule sgd;
  sgd.nesterov = true;
  sgd.alone = true;
  sgd.delay_aware = true;
  UpdateRule lamb = adam;
  lamb.optimizer = Optimizer::kLamb;
  lamb.ahead = 0;
  lamb.commits = true;
  UpdateRule outer = sgd;
  outer.alone = outer.delay_aware = false;
  outer.quorum = 3;
  outer.grace_ms = kMeasuredGrace;
  outer.drops_late = true;
  for (const UpdateRule& rule : {adam, sgd, lamb, outer}) {
    bucket.update = rule;
    const auto back = FromProto(ToProto(7, bucket));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->update, rule);
  }
  v1::RegisterBucketRequest proto = ToProto(7, bucket);
  proto.mutable_update()->set_optimizer(static_cast<v1::Optimizer>(4));
  EXPECT_THAT(Message(FromProto(proto).status()),
              HasSubstr("optimizer of an update is 4, expected 1 to 3"));
  proto = ToProto(7, bucket);
  proto.mutable_update()->set_down(static_cast<v1::WireFormat>(99));
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("down of an update is 99"));
}

TEST(ControlCodecTest, SettingsArriveWholeAlsoWithARatioThatIsNoNumber) {
  const UpdateStep step{
      {GroupStep{.lr = 1, .momentum = 0.5, .beta2 = 0.25, .eps = 1e-8}, GroupStep{.trust_ratio = 3},
       GroupStep{.trust_ratio = std::numeric_limits<double>::quiet_NaN()}},
      8,
      2,
      5,
      true,
      true,
      true};
  EXPECT_EQ(FromProto(ToProto(7, step)).value(), step);
  // A release that knows no ratios gives none.
  v1::SetSettingsRequest proto;
  proto.add_groups()->set_lr(1);
  EXPECT_EQ(FromProto(proto)->groups[0], GroupStep{.lr = 1});
}

TEST(ControlCodecTest, TooManyGroupsOfSettingsAreRefused) {
  v1::SetSettingsRequest proto =
      ToProto(1, {std::vector<GroupStep>(kMaxUpdateGroups, GroupStep{.lr = 1})});
  EXPECT_EQ(FromProto(proto)->groups.size(), kMaxUpdateGroups);
  proto.add_groups();
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("settings of 4097 groups"));
}

TEST(ControlCodecTest, CallsAboutSnapshotsArriveWholeAndSoDoTheirAnswers) {
  const SnapshotCall calls[] = {
      {},
      {SnapshotAction::kTake, {0, 0}},
      {SnapshotAction::kTake, {3, 7}, SnapshotId{3, 5}},
      {SnapshotAction::kRestore, {~uint64_t{0}, 7}},
  };
  for (const SnapshotCall& call : calls) EXPECT_EQ(*FromProto(ToProto(call)), call);
  const SnapshotReport report{{{0, 5}, {3, ~uint64_t{0}}}, true};
  EXPECT_EQ(*FromProto(ToProto(report)), report);
}

TEST(ControlCodecTest, SnapshotCallThatTakesAndRestoresAndLongListsAreRefused) {
  v1::SnapshotsRequest request = ToProto({SnapshotAction::kTake, {1, 2}});
  request.mutable_restore()->set_step(3);
  EXPECT_THAT(Message(FromProto(request).status()), HasSubstr("one to restore, expected one"));
  v1::SnapshotsResponse response =
      ToProto(SnapshotReport{std::vector<SnapshotId>(kMaxListedSnapshots)});
  EXPECT_EQ(FromProto(response)->complete.size(), kMaxListedSnapshots);
  response.add_complete();
  EXPECT_THAT(Message(FromProto(response).status()), HasSubstr("a shard lists 65 snapshots"));
}

TEST(ControlCodecTest, EveryWireFormatAndPartArrives) {
  for (int wire : {1, 2, 3, 4, 16, 17, 18}) {
    const auto format = static_cast<WireFormat>(wire);
    const v1::RegisterBucketRequest proto = ToProto(1, {{0, 0, kMaxParts - 1}, {}, format});
    EXPECT_EQ(static_cast<int>(proto.wire()), wire);
    const auto back = FromProto(proto);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->wire, format);
    EXPECT_EQ(back->id.part, kMaxParts - 1);
  }
}

TEST(ControlCodecTest, FloatsAreTheirLittleEndianBytes) {
  const std::string bytes("\x00\x00\x80\x3f\x00\x00\x00\x80", 8);
  EXPECT_EQ(FloatsToBytes(std::vector<float>{1, -0.0f}), bytes);
  const std::vector<float> back = FloatsFromBytes(bytes).value();
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0], 1);
  EXPECT_TRUE(back[1] == 0 && std::signbit(back[1]));
  EXPECT_TRUE(FloatsFromBytes("")->empty());
  const absl::Status cut = FloatsFromBytes(bytes.substr(0, 7)).status();
  EXPECT_EQ(cut.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(cut), HasSubstr("have 7 bytes, expected a multiple of 4"));
}

TEST(ControlCodecTest, UncountableLayoutsAreRefusedByTensor) {
  const auto refusal = [](std::vector<TensorSpec> tensors) {
    return Message(FromProto(ToProto(1, {{}, {DType::kFloat32, std::move(tensors)}})).status());
  };
  EXPECT_THAT(refusal({{"w\n", {1}}}), HasSubstr("tensor name 'w\\n'"));
  EXPECT_THAT(refusal({{"bad", {-1}}}), HasSubstr("'bad' has a dimension of -1"));
  EXPECT_THAT(refusal({{"big", {1 << 30, 1 << 30, 16}}}), HasSubstr("'big'"));
  EXPECT_THAT(refusal({{"a", {int64_t{1} << 48}}, {"b", {1}}}), HasSubstr("at tensor 'b'"));
  v1::RegisterBucketRequest proto = ToProto(1, BucketAnnouncement{});
  proto.set_dtype(static_cast<v1::DType>(0));
  EXPECT_THAT(Message(FromProto(proto).status()), HasSubstr("is 0, expected 1 to 9"));
  proto = ToProto(1, BucketAnnouncement{});
  for (int wire : {0, 10, 15, 19, 257}) {  // the last would be 1 if it were cut to a byte
    proto.set_wire(static_cast<v1::WireFormat>(wire));
    EXPECT_THAT(Message(FromProto(proto).status()),
                HasSubstr(absl::StrCat("wire of the bucket is ", wire, ", expected 1 to 9 or 16")));
  }
}

TEST(ControlCodecTest, BucketsOfTooManyTensorsAreRefused) {
  v1::RegisterBucketRequest proto = ToProto(1, BucketAnnouncement{});
  for (uint32_t i = 0; i < kMaxBucketTensors; ++i) proto.add_tensors();
  EXPECT_TRUE(FromProto(proto).ok());
  proto.add_tensors();
  const absl::Status refused = FromProto(proto).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(refused), HasSubstr("has 262145 tensors, expected at most 262144"));
}

TEST(ControlCodecTest, RatesThatNoLinkHasAreRefused) {
  using Limits = std::numeric_limits<double>;
  for (const double rate : {-1.0, Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
    v1::JoinRequest proto = ToProto(JoinRequest{});
    proto.set_link_bytes_per_second(rate);
    const absl::Status status = FromProto(proto).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << rate;
    EXPECT_THAT(Message(status), HasSubstr("link_bytes_per_second is"));
  }
  for (const double rate : {0.0, 1.25e10, Limits::max()}) {
    v1::JoinRequest proto = ToProto(JoinRequest{});
    proto.set_link_bytes_per_second(rate);
    EXPECT_TRUE(FromProto(proto).ok()) << rate;
  }
}

TEST(ControlCodecTest, CostsArriveBitForBitBothWays) {
  const std::vector<CodecCost> costs = {{1.0 / 3, 2e-300, 0}, {0, 0.1, 7e-10}};
  const LinkSpeed link{1e9 / 7, std::chrono::microseconds(250)};
  JoinRequest request;
  request.costs = costs;
  const auto arrived = FromProto(ToProto(request));
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  EXPECT_EQ(arrived->costs, costs);
  const auto answer = FromProto(ToProto(1, Terms{0, 4096, 1, 1, link, costs}));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->costs, costs);
  EXPECT_EQ(answer->link.bytes_per_second, link.bytes_per_second);
  EXPECT_EQ(answer->link.round_trip, link.round_trip);
}

TEST(ControlCodecTest, CostsThatNothingHasAreRefused) {
  using Limits = std::numeric_limits<double>;
  JoinRequest request;
  for (const double seconds : {-1e-9, Limits::quiet_NaN(), Limits::infinity()}) {
    for (const CodecCost& cost : {CodecCost{seconds, 1, 1}, {1, seconds, 1}, {1, 1, seconds}}) {
      request.costs = {cost};
      EXPECT_THAT(Message(FromProto(ToProto(request)).status()), HasSubstr("expected finite"));
      const Terms answer{0, 4096, 1, 1, {}, {cost}};
      EXPECT_THAT(Message(FromProto(ToProto(1, answer)).status()), HasSubstr("expected finite"));
    }
  }
  request.costs.assign(kMaxCodecs + 1, {});
  EXPECT_THAT(Message(FromProto(ToProto(request)).status()),
              HasSubstr("those of 6 codecs, expected at most 5"));
}

TEST(ControlCodecTest, HostsRatesAndSharesArriveBothWays) {
  JoinRequest request;
  EXPECT_TRUE(FromProto(ToProto(request))->hosts.empty());
  EXPECT_TRUE(FromProto(ToProto(request))->shard_rates.empty());
  request.hosts = {0, 3, kNoHost};
  request.shard_rates = {0, 1e9 / 3, 2e-300};
  const v1::JoinRequest proto = ToProto(request);
  EXPECT_EQ(proto.shard_hosts(1), 4u);
  EXPECT_EQ(proto.shard_hosts(2), 0u);
  const auto arrived = FromProto(proto);
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  EXPECT_EQ(arrived->hosts, request.hosts);
  EXPECT_EQ(arrived->shard_rates, request.shard_rates);

  Terms terms{0, 4096, 1, 0};
  EXPECT_TRUE(FromProto(ToProto(1, terms))->shares.empty());
  EXPECT_EQ(FromProto(ToProto(1, terms))->forecast, ShareForecast());
  terms.shares = {kShareTotal - 7, 0, 7};
  terms.forecast = {1e-9 / 3, 2e-9, true, 2, 0.75, Advice::kLocalShards, 1e-9 / 7};
  const auto answer = FromProto(ToProto(1, terms));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->weight, 0u);
  EXPECT_EQ(answer->shares, terms.shares);
  EXPECT_EQ(answer->forecast, terms.forecast);
}

TEST(ControlCodecTest, RoundsOfResumedJobsArriveBothWays) {
  const std::vector<BucketRounds> rounds = {{{3, 1, 2}, {7, 0, uint64_t{1} << 40}},
                                            {{4, 0, 0}, {}}};
  JoinRequest request;
  request.resume = rounds;
  const auto arrived = FromProto(ToProto(request));
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  EXPECT_EQ(arrived->resume, rounds);
  request.resume->clear();  // a job without a result yet
  EXPECT_TRUE(FromProto(ToProto(request))->resume.has_value());
  EXPECT_FALSE(FromProto(ToProto(JoinRequest{}))->resume.has_value());

  Terms terms{0, 4096, 1, 1};
  EXPECT_FALSE(FromProto(ToProto(1, terms))->resumed);
  terms.resumed = true;
  terms.wanted = rounds;
  const auto answer = FromProto(ToProto(1, terms));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->resumed);
  EXPECT_EQ(answer->wanted, rounds);
}

TEST(ControlCodecTest, RoundsOfTooManyChunksAreRefused) {
  JoinRequest request;
  request.resume = {{{0, 0, 0}, std::vector<uint64_t>(kMaxResumedChunks - 1, 1)}};
  EXPECT_TRUE(FromProto(ToProto(request)).ok());
  request.resume->push_back({{1, 0, 0}, {}});  // a bucket counts, too
  EXPECT_THAT(Message(FromProto(ToProto(request)).status()),
              HasSubstr("the rounds of 131073 chunks, expected at most 131072"));
}

TEST(ControlCodecTest, AdviceOfALaterReleaseIsNone) {
  v1::JoinResponse proto = ToProto(1, Terms{0, 4096, 1, 0});
  for (const Advice known : {Advice::kAggregator, Advice::kLocalShards, Advice::kFewerBytes}) {
    proto.mutable_forecast()->set_advice(static_cast<v1::Advice>(known));
    EXPECT_EQ(FromProto(proto)->forecast.advice, known);
  }
  proto.mutable_forecast()->set_advice(static_cast<v1::Advice>(4));
  EXPECT_EQ(FromProto(proto)->forecast.advice, Advice::kNone);
}

TEST(ControlCodecTest, RatesAndForecastsThatNothingHasAreRefused) {
  using Limits = std::numeric_limits<double>;
  for (const double value : {-1e-9, Limits::quiet_NaN(), Limits::infinity()}) {
    JoinRequest request;
    request.shard_rates = {1, value};
    EXPECT_THAT(Message(FromProto(ToProto(request)).status()),
                HasSubstr("expected a finite number of 0 or more"));
    for (const ShareForecast& forecast : {ShareForecast{value, 1},
                                          {1, value},
                                          {1, 1, false, 0, value},
                                          {1, 1, false, 0, 1, Advice::kNone, value}}) {
      Terms answer{0, 4096, 1, 0};
      answer.shares = {kShareTotal};
      answer.forecast = forecast;
      EXPECT_THAT(Message(FromProto(ToProto(1, answer)).status()),
                  HasSubstr("expected a finite number of 0 or more"));
    }
  }
}

TEST(ControlCodecTest, AnswersThatNoAggregatorGivesAreRefused) {
  const v1::JoinResponse good = ToProto(1, Terms{0, 4096, 1, 1});
  EXPECT_TRUE(FromProto(good).ok());
  const auto refusal = [&good](auto change) {
    v1::JoinResponse proto = good;
    change(proto);
    return FromProto(proto).status();
  };
  const std::vector<absl::Status> invalid = {
      refusal([](auto& proto) { proto.set_token(0); }),
      refusal([](auto& proto) { proto.set_window_chunks(0); }),
      refusal([](auto& proto) { proto.add_shares(kShareTotal - 1); }),
      // In 32 bits, these sum up to kShareTotal.
      refusal([](auto& proto) {
        proto.add_shares(kShareTotal + 1);
        proto.add_shares(~0u);
      }),
      refusal([](auto& proto) { proto.set_weight(kMaxWeight + 1); }),
      refusal([](auto& proto) { proto.set_chunk_bytes(0); }),
      refusal([](auto& proto) { proto.set_chunk_bytes(4095); }),
      refusal([](auto& proto) { proto.set_chunk_bytes((4 << 20) + 1); }),
  };
  for (const absl::Status& status : invalid) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(Message(status), HasSubstr("the aggregator answered with"));
  }
  const absl::Status other = refusal([](auto& proto) { proto.set_wire_version(kWireVersion + 1); });
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(other), AllOf(HasSubstr(absl::StrCat("wire version ", kWireVersion + 1,
                                                           ", this node speaks ", kWireVersion)),
                                    HasSubstr("install the same release")));
  const absl::Status older = refusal([](auto& proto) { proto.set_wire_version(1); });
  EXPECT_THAT(Message(older),
              HasSubstr(absl::StrCat("wire version 1, this node speaks ", kWireVersion)));
}

}  // namespace
}  // namespace thalweg::codec_test
