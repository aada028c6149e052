#include "server/plan/share_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/shard_place.h"

namespace thalweg {
namespace {

// Whatever has been measured, computing with rates in this range gives finite numbers.
constexpr double kSlowest = 1;
constexpr double kFastest = 1e15;
// Links whose times differ by less are equally busy; shares are rounded to whole numbers.
constexpr double kEquallyBusy = 0.999;
// A description lists the shares of at most this many shards.
constexpr size_t kListed = 16;

double Rate(double rate) { return std::clamp(rate, kSlowest, kFastest); }

bool AllKnown(const Links& links) {
  const auto is_known = [](double rate) { return rate > 0; };
  if (!std::all_of(links.nodes.begin(), links.nodes.end(), is_known)) return false;
  for (size_t k = 0; k < links.hosts.size(); ++k) {
    if (links.hosts[k] == kNoHost && !is_known(links.shards[k])) return false;
  }
  return true;
}

// Returns the largest share of shard `k` that keeps no link busy for longer than `seconds` for each
// byte of gradient.
double LargestShare(const Links& links, size_t k, double seconds) {
  const auto nodes = static_cast<double>(links.nodes.size());
  const uint32_t host = links.hosts[k];
  if (host == kNoHost) return seconds * Rate(links.shards[k]) / nodes;
  if (nodes <= 2) return 1;  // hosting costs nothing: the node sends a result instead of its part
  return std::max(0.0, (seconds * Rate(links.nodes[host]) - 1) / (nodes - 2));
}

std::vector<double> LargestShares(const Links& links, double seconds) {
  std::vector<double> shares(links.hosts.size());
  for (size_t k = 0; k < shares.size(); ++k) shares[k] = LargestShare(links, k, seconds);
  return shares;
}

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Returns the time for each byte of gradient that no shares can shorten.
double LeastSeconds(const Links& links) {
  // A node alone sends nothing to the shard that it hosts.
  if (links.nodes.size() == 1 && std::count(links.hosts.begin(), links.hosts.end(), 0u) > 0) {
    return 0;
  }
  return 1 / Rate(*std::min_element(links.nodes.begin(), links.nodes.end()));
}

// Returns the shares as parts of 1.
std::vector<double> BestShares(const Links& links) {
  const auto suffices = [&](double seconds) { return Sum(LargestShares(links, seconds)) >= 1; };
  double high = LeastSeconds(links);
  if (!suffices(high)) {
    double low = high;
    while (!suffices(high)) high *= 2;
    constexpr int kBitsOfADouble = 53;
    for (int i = 0; i < kBitsOfADouble; ++i) {
      const double middle = low + (high - low) / 2;
      (suffices(middle) ? high : low) = middle;
    }
  }
  std::vector<double> shares = LargestShares(links, high);
  const double sum = Sum(shares);
  for (double& share : shares) share /= sum;
  return shares;
}

// Rounds down, and gives what remains to the shares that have lost most.
std::vector<uint32_t> ToWholeNumbers(const std::vector<double>& shares) {
  std::vector<uint32_t> whole(shares.size());
  std::vector<double> lost(shares.size());
  uint32_t left = kShareTotal;
  for (size_t k = 0; k < shares.size(); ++k) {
    const double exact = shares[k] * kShareTotal;
    whole[k] = std::min(static_cast<uint32_t>(exact), left);
    lost[k] = exact - whole[k];
    left -= whole[k];
  }
  std::vector<size_t> order(shares.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return std::pair(-lost[a], a) < std::pair(-lost[b], b); });
  for (size_t i = 0; left > 0; i = (i + 1) % order.size(), --left) ++whole[order[i]];
  return whole;
}

ShareForecast Forecast(const Links& links, const std::vector<uint32_t>& shares) {
  const auto nodes = static_cast<double>(links.nodes.size());
  std::vector<ShareForecast> busy;  // by link
  for (uint32_t i = 0; i < links.nodes.size(); ++i) {
    busy.push_back({.at_shard = false, .number = i, .load = 1});
  }
  for (uint32_t k = 0; k < shares.size(); ++k) {
    const double share = static_cast<double>(shares[k]) / kShareTotal;
    const uint32_t host = links.hosts[k];
    if (host != kNoHost) {
      busy[host].load += (nodes - 2) * share;
    } else {
      busy.push_back({.at_shard = true, .number = k, .load = nodes * share});
    }
  }
  double longest = 0;
  for (ShareForecast& link : busy) {
    const double rate = link.at_shard ? links.shards[link.number] : links.nodes[link.number];
    link.seconds_per_byte = link.load / Rate(rate);
    longest = std::max(longest, link.seconds_per_byte);
  }
  ShareForecast forecast = *std::find_if(busy.begin(), busy.end(), [&](const ShareForecast& link) {
    return link.seconds_per_byte >= kEquallyBusy * longest;
  });
  forecast.seconds_per_byte = longest;
  const double slowest = Rate(*std::min_element(links.nodes.begin(), links.nodes.end()));
  forecast.ring_seconds_per_byte = 2 * (nodes - 1) / nodes / slowest;
  return forecast;
}

SharePlan Optimum(const Links& links) {
  SharePlan plan{ToWholeNumbers(BestShares(links)), {}};
  plan.forecast = Forecast(links, plan.shares);
  return plan;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Adds a shard with a machine of its own, whose link is as fast as that of the median one, or of
// the median node if there is none.
Links WithAggregator(Links links) {
  std::vector<double> rates;
  for (size_t k = 0; k < links.hosts.size(); ++k) {
    if (links.hosts[k] == kNoHost) rates.push_back(links.shards[k]);
  }
  links.hosts.push_back(kNoHost);
  links.shards.push_back(Median(rates.empty() ? links.nodes : rates));
  return links;
}

Links WithLocalShards(Links links) {
  std::vector<bool> hosts_one(links.nodes.size());
  for (const uint32_t host : links.hosts) {
    if (host != kNoHost) hosts_one[host] = true;
  }
  for (uint32_t node = 0; node < hosts_one.size(); ++node) {
    if (!hosts_one[node]) links.hosts.push_back(node);
  }
  links.shards.resize(links.hosts.size());
  return links;
}

// Fills in the advice. Local shards need no machine, so they come first if both help as much.
void Advise(const Links& links, ShareForecast* forecast) {
  if (links.nodes.size() < 2) return;
  const double aggregator = Optimum(WithAggregator(links)).forecast.seconds_per_byte;
  const double local = Optimum(WithLocalShards(links)).forecast.seconds_per_byte;
  const double best = std::min(aggregator, local);
  if (best >= kEquallyBusy * forecast->seconds_per_byte) {
    forecast->advice = Advice::kFewerBytes;
    return;
  }
  forecast->advice =
      kEquallyBusy * local <= aggregator ? Advice::kLocalShards : Advice::kAggregator;
  forecast->advised_seconds_per_byte =
      forecast->advice == Advice::kLocalShards ? local : aggregator;
}

// Rounds to three digits.
double Rounded(double value) {
  if (value == 0) return 0;
  const double unit = std::pow(10, std::floor(std::log10(value)) - 2);
  return std::round(value / unit) * unit;
}

std::string DescribeShares(const std::vector<uint32_t>& shares) {
  const bool all_equal =
      std::adjacent_find(shares.begin(), shares.end(), std::not_equal_to<>()) == shares.end();
  if (all_equal) {
    return shares.size() == 1 ? "one shard sums everything"
                              : absl::StrCat(shares.size(), " shards sum equal shares");
  }
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  const auto percent = [total](uint32_t share) {
    return absl::StrCat(Rounded(100 * share / total), " %");
  };
  if (shares.size() > kListed) {
    const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
    return absl::StrCat("shares of the ", shares.size(), " shards: ", percent(*least), " to ",
                        percent(*most));
  }
  std::vector<std::string> texts;
  std::transform(shares.begin(), shares.end(), std::back_inserter(texts), percent);
  return absl::StrCat("shares of the shards: ", absl::StrJoin(texts, ", "));
}

std::string DescribeAdvice(const ShareForecast& forecast) {
  const auto instead = [&] {
    return absl::StrCat(" 100 MB would take ", Rounded(1e8 * forecast.advised_seconds_per_byte),
                        " s");
  };
  switch (forecast.advice) {
    case Advice::kAggregator:
      return absl::StrCat("; with one more aggregator", instead());
    case Advice::kLocalShards:
      return absl::StrCat("; with a shard on every node (THALWEG_LOCAL_SHARDS=1)", instead());
    case Advice::kFewerBytes:
      return "; a codec that sends less, or a faster link, would help";
    case Advice::kNone:
      break;
  }
  return "";
}

}  // namespace

SharePlan PlanShares(const Links& links) {
  if (!AllKnown(links)) {
    const size_t count = links.hosts.size();
    return {ToWholeNumbers(std::vector<double>(count, 1.0 / static_cast<double>(count))), {}};
  }
  SharePlan plan = Optimum(links);
  Advise(links, &plan.forecast);
  return plan;
}

std::string Describe(const SharePlan& plan) {
  const ShareForecast& forecast = plan.forecast;
  std::string text = DescribeShares(plan.shares);
  if (forecast.seconds_per_byte <= 0) return text;
  absl::StrAppend(&text, "; 100 MB take ", Rounded(1e8 * forecast.seconds_per_byte), " s");
  if (forecast.ring_seconds_per_byte > 0) {
    const double times = Rounded(forecast.seconds_per_byte / forecast.ring_seconds_per_byte);
    absl::StrAppend(&text, ", ", times == 1 ? "" : absl::StrCat(times, " times "),
                    "as long as in a ring");
  }
  absl::StrAppend(&text, "; ", forecast.at_shard ? "shard " : "node ", forecast.number,
                  "'s link carries ");
  const double load = Rounded(forecast.load);
  absl::StrAppend(&text,
                  load == 1 ? "the gradient once" : absl::StrCat(load, " times the gradient"));
  return text + DescribeAdvice(forecast);
}

}  // namespace thalweg
