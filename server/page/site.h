// Site serves the live page of a shard, the JSON API that the page reads, and that of a sidecar
// (docs/api.md).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/exchange/flight_report.h"
#include "core/exchange/shard_report.h"
#include "server/base/http_reply.h"
#include "server/page/shard_json.h"

namespace thalweg {

// A Site is thread-safe if its sources are.
class Site {
 public:
  // What the process tells of itself; none of them may block.
  struct Sources {
    std::function<ShardReport()> shard;                    // null: there is no shard here
    std::function<std::vector<JobFlights>()> collectives;  // null: this is no sidecar
  };
  Site(Sources sources, StartTime started) : sources_(std::move(sources)), started_(started) {}

  // Answers for HttpServer: the page, its assets and the API; 404 with a JSON error for other
  // paths.
  HttpReply Answer(const std::string& path) const;

 private:
  HttpReply AnswerApi(const std::string& what) const;
  // Returns the paths of what the API has here, separated by commas.
  std::string Names() const;

  const Sources sources_;
  const StartTime started_;
};

}  // namespace thalweg
