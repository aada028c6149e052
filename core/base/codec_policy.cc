#include "core/base/codec_policy.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// No tensor has more elements, nor dimensions.
constexpr uint64_t kMaxBound = uint64_t{1} << 48;
// An error message quotes at most this much of a rule.
constexpr size_t kMaxQuotedBytes = 100;

// A Bound is a bound of a rule in its text form. The text excludes N, the fields include it.
struct Bound {
  absl::string_view text;  // "elems>"
  uint64_t CodecRule::* field;

  bool IsLower() const { return text.back() == '>'; }
  uint64_t Unset() const { return IsLower() ? 0 : CodecRule::kUnbounded; }
};

constexpr Bound kBounds[] = {{"elems>", &CodecRule::min_elems},
                             {"elems<", &CodecRule::max_elems},
                             {"dims>", &CodecRule::min_dims},
                             {"dims<", &CodecRule::max_dims}};

// If the rest does not fit, the last * is tried with a longer run; earlier ones never need to
// change, so this takes at most pattern times name steps.
bool MatchesPattern(absl::string_view pattern, absl::string_view name) {
  size_t p = 0;
  size_t n = 0;
  std::optional<std::pair<size_t, size_t>>
      last_star;  // where to resume: after the *, and in the name
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      last_star = {++p, n};
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (last_star.has_value()) {
      p = last_star->first;
      n = ++last_star->second;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == absl::string_view::npos;
}

absl::Status SetPattern(absl::string_view match, CodecRule& rule) {
  if (match.empty()) {
    return absl::InvalidArgumentError(
        "an empty match, expected a pattern of names, elems<N, elems>N, dims<N or dims>N");
  }
  if (match.find_first_of("<>") != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", match, "' is no bound, expected elems<N, elems>N, dims<N or dims>N"));
  }
  if (rule.name != "*") {
    return absl::InvalidArgumentError(absl::StrCat("two patterns, '", rule.name, "' and '", match,
                                                   "', expected one: make it two rules"));
  }
  rule.name = std::string(match);
  return absl::OkStatus();
}

absl::Status SetBound(const Bound& bound, absl::string_view number, CodecRule& rule) {
  uint64_t value = 0;
  const uint64_t least = bound.IsLower() ? 0 : 1;
  if (!absl::SimpleAtoi(number, &value) || value < least || value > kMaxBound) {
    return absl::InvalidArgumentError(absl::StrCat("'", bound.text, number, "' has the bound '",
                                                   number, "', expected ", least, " to ",
                                                   kMaxBound));
  }
  if (rule.*bound.field != bound.Unset()) {
    return absl::InvalidArgumentError(absl::StrCat("two bounds ", bound.text, "N, expected one"));
  }
  rule.*bound.field = bound.IsLower() ? value + 1 : value - 1;
  return absl::OkStatus();
}

absl::Status SetMatch(absl::string_view match, CodecRule& rule) {
  for (const Bound& bound : kBounds) {
    if (absl::ConsumePrefix(&match, bound.text)) return SetBound(bound, match, rule);
  }
  return SetPattern(match, rule);
}

absl::StatusOr<CodecRule> ParseRule(absl::string_view text) {
  const size_t equals = text.find('=');
  if (equals == absl::string_view::npos) {
    return absl::InvalidArgumentError("expected MATCH=CODEC, such as *.bias=fp32");
  }
  CodecRule rule;
  for (const absl::string_view match : absl::StrSplit(text.substr(0, equals), '&')) {
    THALWEG_RETURN_IF_ERROR(SetMatch(absl::StripAsciiWhitespace(match), rule));
  }
  THALWEG_ASSIGN_OR_RETURN(rule.codec,
                           CodecSpec::Parse(absl::StripAsciiWhitespace(text.substr(equals + 1))));
  if (rule.codec.kind == CodecKind::kAuto) {
    return absl::InvalidArgumentError("auto chooses for whole buckets: make it the default");
  }
  return rule;
}

absl::Status WrongRule(size_t number, absl::string_view text, absl::string_view why) {
  size_t quoted = std::min(text.size(), kMaxQuotedBytes);
  const char* rest = quoted < text.size() ? "…" : "";
  // The cut must not be amid the bytes of a character of UTF-8.
  while (quoted > 0 && quoted < text.size() && (text[quoted] & 0xC0) == 0x80) --quoted;
  return absl::InvalidArgumentError(
      absl::StrCat("codec policy: rule ", number, " '", text.substr(0, quoted), rest, "': ", why));
}

absl::Status CheckSize(size_t bytes) {
  if (bytes <= kMaxPolicyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("codec policy: ", bytes,
                                                 " bytes of text, at most ", kMaxPolicyBytes,
                                                 " are allowed: let one pattern "
                                                 "stand for several names"));
}

std::string RuleText(const CodecRule& rule) {
  std::vector<std::string> matches;
  for (const Bound& bound : kBounds) {
    const uint64_t value = rule.*bound.field;
    if (value == bound.Unset()) continue;
    matches.push_back(absl::StrCat(bound.text, bound.IsLower() ? value - 1 : value + 1));
  }
  if (rule.name != "*" || matches.empty()) matches.insert(matches.begin(), rule.name);
  return absl::StrCat(absl::StrJoin(matches, "&"), "=", rule.codec.ToString());
}

}  // namespace

bool CodecRule::Matches(const TensorSpec& tensor) const {
  const uint64_t elems = tensor.Elems();
  const uint64_t dims = tensor.shape.size();
  return min_elems <= elems && elems <= max_elems && min_dims <= dims && dims <= max_dims &&
         MatchesPattern(name, tensor.name);
}

absl::StatusOr<CodecPolicy> CodecPolicy::Parse(absl::string_view text) {
  THALWEG_RETURN_IF_ERROR(CheckSize(text.size()));
  const std::vector<absl::string_view> pieces = absl::StrSplit(text, ';');
  CodecPolicy policy;
  THALWEG_ASSIGN_OR_RETURN(policy.fallback,
                           CodecSpec::Parse(absl::StripAsciiWhitespace(pieces.front())));
  for (size_t i = 1; i < pieces.size(); ++i) {
    auto rule = ParseRule(pieces[i]);
    if (!rule.ok()) return WrongRule(i, pieces[i], rule.status().message());
    policy.rules.push_back(*std::move(rule));
  }
  THALWEG_RETURN_IF_ERROR(CheckSize(policy.ToString().size()));
  if (const size_t codecs = policy.Codecs().size(); codecs > kMaxCodecs) {
    const bool chosen = policy.fallback.kind == CodecKind::kAuto;
    return absl::InvalidArgumentError(absl::StrCat("codec policy: ", codecs, " different codecs",
                                                   chosen ? ", those of auto included" : "",
                                                   ", at most ", kMaxCodecs, " are allowed"));
  }
  return policy;
}

std::string CodecPolicy::ToString() const {
  std::string text = fallback.ToString();
  for (const CodecRule& rule : rules) absl::StrAppend(&text, ";", RuleText(rule));
  return text;
}

std::vector<CodecSpec> CodecPolicy::Codecs() const {
  std::vector<CodecSpec> codecs;
  if (fallback.kind == CodecKind::kAuto) {
    codecs = AutoCandidates(fallback);
  } else {
    codecs.push_back(fallback);
  }
  for (const CodecRule& rule : rules) {
    if (std::find(codecs.begin(), codecs.end(), rule.codec) == codecs.end()) {
      codecs.push_back(rule.codec);
    }
  }
  return codecs;
}

const CodecSpec& CodecPolicy::CodecOf(const TensorSpec& tensor) const {
  for (const CodecRule& rule : rules) {
    if (rule.Matches(tensor)) return rule.codec;
  }
  return fallback;
}

bool CodecPolicy::IsPlainCast() const { return fallback.kind == CodecKind::kCast && rules.empty(); }

DType ShareType(DType bucket, const CodecPolicy& codec, uint32_t workers_on_node,
                GradientPath path) {
  const bool narrowed = workers_on_node == 1 && codec.IsPlainCast() && path == GradientPath::kCpu;
  return narrowed ? DenseType(bucket, codec.fallback) : bucket;
}

}  // namespace thalweg
