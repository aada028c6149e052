#include "server/snapshot/crc32c.h"

#include <gtest/gtest.h>

#include <string>

namespace thalweg::crc32c_test {
namespace {

// The examples of RFC 3720, B.4, and the check value of the polynomial.
TEST(Crc32cTest, ChecksumsAreThoseOfTheStandard) {
  std::string ascending;
  for (char byte = 0; byte < 32; ++byte) ascending.push_back(byte);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(Crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(""), 0u);
}

}  // namespace
}  // namespace thalweg::crc32c_test
