// What a program answers over HTTP, whoever serves it.
#pragma once

#include <functional>
#include <string>

namespace thalweg {

struct HttpReply {
  int status = 200;
  std::string type;  // Content-Type
  std::string body;
};

// The answer to GET `path`, which comes decoded and without a query. Called from several threads.
using HttpHandler = std::function<HttpReply(const std::string& path)>;

}  // namespace thalweg
