#include "server/base/text_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace thalweg::text_file_test {
namespace {

TEST(TextFileTest, AllBytesAreReadAndAnEmptyFileIsNoMissingOne) {
  const std::string path = ::testing::TempDir() + "text_file_test";
  const std::string bytes("a\r\n\0b", 5);
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_EQ(ReadTextFile(path), bytes);
  std::ofstream(path, std::ios::trunc);
  EXPECT_EQ(ReadTextFile(path), "");
}

TEST(TextFileTest, NothingIsReadOfWhatIsMissingOrAFolder) {
  EXPECT_EQ(ReadTextFile("/none"), std::nullopt);
  EXPECT_EQ(ReadTextFile(::testing::TempDir()), std::nullopt);
}

}  // namespace
}  // namespace thalweg::text_file_test
