#include "server/net/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace thalweg {
namespace {

using ::testing::HasSubstr;

TEST(AddressTest, HostAndPortAreTakenApart) {
  const auto expect = [](const char* text, const char* host, int port) {
    const auto address = ParseHostPort(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->host, host);
    EXPECT_EQ(address->port, port);
  };
  expect("127.0.0.1:7070", "127.0.0.1", 7070);
  expect("shard-0.agg:0", "shard-0.agg", 0);
  expect("[::1]:65535", "::1", 65535);
  expect(":9090", "0.0.0.0", 9090);
  EXPECT_EQ(ToString(HostPort{"::1", 80}), "[::1]:80");
}

TEST(AddressTest, MalformedAddressesAreRefusedByName) {
  for (const char* text : {"", "host", "host:", "host:x", "host:65536", "host:-1", "::1:80"}) {
    const auto address = ParseHostPort(text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(address.status().message()), HasSubstr(text));
  }
}

}  // namespace
}  // namespace thalweg
