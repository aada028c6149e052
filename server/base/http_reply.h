// HttpReply is a program's answer over HTTP, independent of the server that sends it.
#pragma once

#include <functional>
#include <string>

namespace thalweg {

struct HttpReply {
  int status = 200;
  std::string type;  // Content-Type
  std::string body;
};

// An HttpHandler answers GET `path`, which is decoded and has no query. It is called from several
// threads.
using HttpHandler = std::function<HttpReply(const std::string& path)>;

}  // namespace thalweg
