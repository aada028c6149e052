// The live page of a shard, and the JSON API that it reads (docs/api.md).
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/base/http_reply.h"
#include "core/base/shard_report.h"
#include "server/page/shard_json.h"

namespace thalweg {

// Thread-safe, if `report` is.
class Site {
 public:
  // `report` says how the shard is doing now. It must not block.
  Site(std::function<ShardReport()> report, StartTime started)
      : report_(std::move(report)), started_(started) {}

  // For HttpServer: the page, its parts, and the API; 404 with an error in JSON for other paths.
  HttpReply Answer(const std::string& path) const;

 private:
  HttpReply AnswerApi(const std::string& what) const;

  const std::function<ShardReport()> report_;
  const StartTime started_;
};

}  // namespace thalweg
