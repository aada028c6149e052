// Fuzzing changes what is in its corpus: of messages that are refused by now it would try little.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "core/base/fuzzing.h"
#include "core/ipc/message.h"

namespace thalweg::fuzz_corpus_test {
namespace {

constexpr uint16_t kHello = 0;  // these two are sidecar_fuzz's own, and it sets the third's version
constexpr uint16_t kGone = 255;
constexpr uint16_t kHostShard = 12;
const std::set<std::string> kNoMessages = {"garbage", "endless_timeout"};

TEST(SidecarCorpusTest, MessagesAreThereAsTheyAreWrittenNow) {
  const std::filesystem::path corpus =
      std::filesystem::path(__FILE__).parent_path() / "../../tests/fuzz/sidecar_fuzz";
  std::set<uint16_t> types;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    if (kNoMessages.contains(entry.path().filename())) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    FuzzInput input(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    while (!input.IsEmpty()) {
      input.Byte();
      const uint16_t type = input.Byte();
      input.Byte();
      const auto body = input.Take(input.Short());
      if (type == kHello || type == kGone || type == kHostShard) continue;
      const auto message = ipc::ParseBody(type, body);
      EXPECT_TRUE(message.ok()) << entry.path() << ": type " << type << ": " << message.status();
      types.insert(type);
    }
  }
  for (const uint16_t type : {3, 5, 8, 15, 17, 20, 21, 22}) EXPECT_TRUE(types.contains(type));
}

}  // namespace
}  // namespace thalweg::fuzz_corpus_test
