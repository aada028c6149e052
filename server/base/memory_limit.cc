#include "server/base/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace thalweg {
namespace {

// Lowers `limit` to the number in the file. A file that is absent or says "max" sets no limit.
void Lower(const std::string& file, uint64_t* limit) {
  std::ifstream in(file);
  uint64_t bytes = 0;
  if (in >> bytes) *limit = std::min(*limit, bytes);
}

}  // namespace

uint64_t MemoryLimit(const std::string& root) {
  uint64_t limit =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // The line is "number:controllers:path"; version 2 names no controllers.
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool unified = fields[1].empty();
    if (!unified && fields[1] != "memory") continue;
    const char* name = unified ? "/memory.max" : "/memory.limit_in_bytes";
    std::string group = absl::StrCat(root, "/sys/fs/cgroup", unified ? "" : "/memory");
    Lower(absl::StrCat(group, name), &limit);
    // A container may see its own group as the top one, and still be told the whole path.
    for (const absl::string_view part : absl::StrSplit(fields[2], '/', absl::SkipEmpty())) {
      absl::StrAppend(&group, "/", part);
      Lower(absl::StrCat(group, name), &limit);
    }
  }
  return limit;
}

}  // namespace thalweg
