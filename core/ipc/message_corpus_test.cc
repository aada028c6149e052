// Fuzzing changes what is in its corpus: of messages that are refused by now it would try little.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/ipc/random_message.h"

namespace thalweg::ipc::message_corpus_test {
namespace {

constexpr size_t kTypes = std::variant_size_v<Message>;
constexpr size_t kSmall = 400;  // bytes

std::filesystem::path Corpus() {
  return std::filesystem::path(__FILE__).parent_path() / "../../tests/fuzz/message_fuzz";
}

// Returns whether the message has what others of its type may lack.
bool IsFull(const Message& message) {
  if (const auto* bucket = std::get_if<RegisterBucket>(&message)) {
    return bucket->update && !bucket->layout.tensors.empty();
  }
  const auto* settings = std::get_if<SetSettings>(&message);
  return settings == nullptr || !settings->step.groups.empty();
}

std::string MakeFrame(size_t type) {
  for (uint64_t seed = 1;; ++seed) {
    RandomMessages random(seed);
    const Message message = random.OfType(type);
    const std::string frame = EncodeFrame(message, type % 2 == 0);
    if (IsFull(message) && frame.size() < kSmall) return frame;
  }
}

// Returns whether the bytes of a file are one of the messages that it is named after.
bool IsOne(const std::string& frame, const Message& message) {
  if (frame.size() < kFrameHeaderBytes) return false;
  const auto bytes = std::as_bytes(std::span(frame.data(), frame.size()));
  const auto header = ParseFrameHeader(bytes.first(kFrameHeaderBytes));
  if (!header.ok()) return false;
  const auto parsed = ParseBody(header->type, bytes.subspan(kFrameHeaderBytes));
  return parsed.ok() && parsed->index() == message.index() && IsFull(*parsed);
}

TEST(MessageCorpusTest, EachMessageIsThereAsItIsWrittenNow) {
  const std::filesystem::path anew = std::filesystem::path(testing::TempDir()) / "message_fuzz";
  std::filesystem::create_directories(anew);
  for (size_t type = 0; type < kTypes; ++type) {
    const Message message = RandomMessages(1).OfType(type);
    std::ifstream file(Corpus() / Name(message));
    const std::string frame((std::istreambuf_iterator<char>(file)), {});
    if (IsOne(frame, message)) continue;
    std::ofstream(anew / Name(message)) << MakeFrame(type);
    ADD_FAILURE() << "tests/fuzz/message_fuzz/" << Name(message)
                  << " is refused; one that is not is " << anew / Name(message);
  }
}

}  // namespace
}  // namespace thalweg::ipc::message_corpus_test
