// Paths that browsers ask for, and names that nodes give: every answer of the API is JSON, and a
// job is found by its name. A byte is the length of a job's name, two that of a reason, and the
// rest is the path.

#include <nlohmann/json.hpp>
#include <string>

#include "core/base/fuzzing.h"
#include "server/page/site.h"

namespace thalweg {
namespace {

void CheckReply(const HttpReply& reply) {
  Promise(reply.status == 200 || reply.status == 404, "a page is there, or it is not");
  if (reply.type != "application/json") return Promise(reply.status == 200, "errors are JSON");
  Promise(nlohmann::json::accept(reply.body), "the API answers in JSON");
}

void Run(FuzzInput input) {
  ShardReport report;
  JobReport& job = report.jobs.emplace_back();
  job.name = input.Text(input.Byte());
  job.failure = input.Text(input.Short());
  job.codec = job.failure;
  job.nodes.resize(1);
  job.nodes[0].name = job.name;
  report.faults.push_back({job.name, absl::StatusCode::kUnknown, job.failure, true, 0, {}});
  const Site site({[&report] { return report; }, nullptr}, 1.0);
  const std::string path = input.Text(1 << 16);
  for (const std::string& each :
       {path, "/api/v1/" + path, std::string("/api/v1/shard"), std::string("/api/v1/jobs")}) {
    CheckReply(site.Answer(each));
  }
  const HttpReply found = site.Answer("/api/v1/jobs/" + job.name);
  CheckReply(found);
  Promise(job.name.empty() || found.status == 200, "a job is found by its name");
}

}  // namespace
}  // namespace thalweg

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thalweg::Run(thalweg::FuzzInput(data, size));
  return 0;
}
