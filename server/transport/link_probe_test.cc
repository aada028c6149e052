#include "server/transport/link_probe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <vector>

namespace thalweg::link_probe_test {
namespace {

using std::chrono::milliseconds;

// A Link simulates a link behind a token bucket, as `tc tbf` makes them, in seconds and bytes.
class Link {
 public:
  Link(double rate, double burst, double round_trip)
      : rate_(rate), burst_(burst), round_trip_(round_trip), tokens_(burst) {}

  Duration Call(double bytes) {
    // Saved-up tokens pass at the rate of the wire behind the bucket; the rest passes at the token
    // rate.
    constexpr double kWire = 10e9;
    const double begin = now_;
    double waits = bytes / kWire;
    if (bytes > tokens_ + rate_ * waits) waits = (bytes - tokens_) / rate_;
    tokens_ = tokens_ + rate_ * waits - bytes;
    now_ += waits + round_trip_;
    tokens_ = std::min(burst_, tokens_ + rate_ * round_trip_);
    sent_ += bytes;
    return FromSeconds(now_ - begin);
  }

  double now() const { return now_; }
  double sent() const { return sent_; }

 private:
  const double rate_;
  const double burst_;
  const double round_trip_;
  double tokens_;
  double now_ = 0;
  double sent_ = 0;
};

using Case = std::tuple<double, double, double>;  // rate, burst, round trip

class LinkProbeTest : public ::testing::TestWithParam<Case> {};

TEST_P(LinkProbeTest, RateIsFoundBehindATokenBucket) {
  const auto [rate, burst, round_trip] = GetParam();
  Link link(rate, burst, round_trip);
  const auto speed = ProbeLink([&link](size_t bytes) { return link.Call(double(bytes)); });
  ASSERT_TRUE(speed.ok()) << speed.status();
  EXPECT_NEAR(ToSeconds(speed->round_trip), round_trip, 1e-6);
  // The error is the tokens that the bucket saves up during the call's own round trip (a measurable
  // call takes five round trips), or a whole bucket of 256 KiB out of 4 MiB.
  EXPECT_GE(speed->bytes_per_second, 0.99 * rate);
  const bool is_near = round_trip <= 1e-3;
  EXPECT_LE(speed->bytes_per_second, (is_near ? 1.07 : 1.25) * rate);
  EXPECT_LE(link.now(), is_near && rate >= 12.5e6 ? 0.35 : 1.6);
}

INSTANTIATE_TEST_SUITE_P(Links, LinkProbeTest,
                         ::testing::Combine(::testing::Values(1.25e6, 12.5e6, 31.25e6, 125e6,
                                                              312.5e6, 1.25e9),
                                            ::testing::Values(0.0, 32768.0, 131072.0, 262144.0),
                                            ::testing::Values(50e-6, 1e-3, 20e-3)));

TEST(LinkProbeTest, FastLinkIsMeasuredWithFewMegabytes) {
  Link link(10e9, 0, 1e-4);
  ASSERT_TRUE(ProbeLink([&link](size_t bytes) { return link.Call(double(bytes)); }).ok());
  EXPECT_LE(link.sent(), 6.0 * kMaxProbeBytes);
}

TEST(LinkProbeTest, CallsThatWaitForACoreAndThoseAfterThemDoNotCount) {
  Link link(31.25e6, 262144, 1e-4);
  int timed_calls = 0;
  const auto speed = ProbeLink([&](size_t bytes) {
    const Duration took = link.Call(double(bytes));
    if (took < milliseconds(20)) return took;
    // Two calls wait for 12 ms each; the two after them find the tokens of these.
    constexpr Duration kTimes[] = {milliseconds(12), milliseconds(-12)};
    const int call = timed_calls++;
    return took + (call < 4 ? kTimes[call % 2] : Duration::zero());
  });
  ASSERT_TRUE(speed.ok()) << speed.status();
  EXPECT_NEAR(speed->bytes_per_second / 31.25e6, 1, 0.01);
}

TEST(LinkProbeTest, RoundTripIsTheShortestOfSeveral) {
  std::vector<Duration> empty_calls = {milliseconds(9), milliseconds(2), milliseconds(5),
                                       milliseconds(3), milliseconds(4)};
  auto next = empty_calls.begin();
  const auto speed = ProbeLink([&](size_t bytes) -> absl::StatusOr<Duration> {
    if (bytes == 0) return *next++;
    return milliseconds(40);
  });
  ASSERT_TRUE(speed.ok());
  EXPECT_EQ(speed->round_trip, milliseconds(2));
  EXPECT_EQ(next, empty_calls.end());
}

TEST(LinkProbeTest, FirstErrorIsReturned) {
  int calls = 0;
  const auto speed = ProbeLink([&](size_t) -> absl::StatusOr<Duration> {
    if (++calls == 3) return absl::UnavailableError("gone");
    return milliseconds(1);
  });
  EXPECT_EQ(speed.status(), absl::UnavailableError("gone"));
  EXPECT_EQ(calls, 3);
}

TEST(LinkProbeTest, ClockThatStandsStillGivesAFiniteRate) {
  const auto speed = ProbeLink([](size_t) -> absl::StatusOr<Duration> { return Duration::zero(); });
  ASSERT_TRUE(speed.ok());
  EXPECT_GT(speed->bytes_per_second, 0);
  EXPECT_LT(speed->bytes_per_second, 1e14);
}

}  // namespace
}  // namespace thalweg::link_probe_test
