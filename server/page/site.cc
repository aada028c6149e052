#include "server/page/site.h"

#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/page/assets.h"

namespace thalweg {
namespace {

constexpr char kJson[] = "application/json";
constexpr char kApi[] = "/api/v1/";

std::string TypeOf(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  if (name.ends_with(".svg")) return "image/svg+xml";
  return "text/javascript; charset=utf-8";
}

HttpReply NotFound(const std::string& what) { return {404, kJson, ErrorJson(what)}; }

}  // namespace

HttpReply Site::Answer(const std::string& path) const {
  absl::string_view rest = path;
  if (absl::ConsumePrefix(&rest, kApi)) return AnswerApi(std::string(rest));
  const std::string name = path == "/" ? "index.html" : path.substr(path.empty() ? 0 : 1);
  // The page is that of a shard.
  const Asset* const asset = sources_.shard == nullptr ? nullptr : FindAsset(name);
  if (asset != nullptr) return {200, TypeOf(asset->name), std::string(asset->bytes)};
  return NotFound(absl::StrCat("no page ", path, "; there are ", sources_.shard ? "/, " : "",
                               "/metrics, /healthz, /readyz, ", Names()));
}

HttpReply Site::AnswerApi(const std::string& what) const {
  if (what == "collectives" && sources_.collectives) {
    return {200, kJson, CollectivesJson(sources_.collectives(), started_)};
  }
  absl::string_view job = what;
  if (sources_.shard == nullptr ||
      (what != "shard" && what != "jobs" && (!absl::ConsumePrefix(&job, "jobs/") || job.empty()))) {
    return NotFound(absl::StrCat("no ", kApi, what, "; there are ", Names()));
  }
  const ShardReport report = sources_.shard();
  if (what == "shard") return {200, kJson, ShardJson(report, started_)};
  if (what == "jobs") return {200, kJson, JobsJson(report, started_)};
  std::string json = JobJson(report, started_, std::string(job));
  if (!json.empty()) return {200, kJson, std::move(json)};
  return NotFound(absl::StrCat("no job '", job, "' has members on this shard"));
}

std::string Site::Names() const {
  std::vector<std::string> names;
  if (sources_.shard) names = {"shard", "jobs", "jobs/NAME"};
  if (sources_.collectives) names.emplace_back("collectives");
  for (std::string& name : names) name = kApi + name;
  return absl::StrJoin(names, ", ");
}

}  // namespace thalweg
