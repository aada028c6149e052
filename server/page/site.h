// Site serves the live page of a shard and the JSON API that the page reads (docs/api.md).
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/base/http_reply.h"
#include "core/exchange/shard_report.h"
#include "server/page/shard_json.h"

namespace thalweg {

// A Site is thread-safe if `report` is.
class Site {
 public:
  // `report` returns the shard's current state. It must not block.
  Site(std::function<ShardReport()> report, StartTime started)
      : report_(std::move(report)), started_(started) {}

  // Answers for HttpServer: the page, its assets and the API; 404 with a JSON error for other
  // paths.
  HttpReply Answer(const std::string& path) const;

 private:
  HttpReply AnswerApi(const std::string& what) const;

  const std::function<ShardReport()> report_;
  const StartTime started_;
};

}  // namespace thalweg
