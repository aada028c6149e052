#include "server/net/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace thalweg::address_test {
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

TEST(AddressTest, RangeOfPortsHasAnAddressForEach) {
  const auto expect = [](const char* text, std::vector<std::string> expected) {
    const auto addresses = ParsePorts(text);
    ASSERT_TRUE(addresses.ok()) << addresses.status();
    std::vector<std::string> texts;
    for (const HostPort& address : *addresses) texts.push_back(ToString(address));
    EXPECT_EQ(texts, expected);
  };
  expect("10.0.0.1:0", {"10.0.0.1:0"});
  expect("node-1:7100-7102", {"node-1:7100", "node-1:7101", "node-1:7102"});
  expect("[::1]:65535-65535", {"[::1]:65535"});
}

TEST(AddressTest, MalformedRangesAreRefused) {
  for (const char* text :
       {"", "host:", "host:2-1", "host:0-5", "host:1-", "host:1-70000", "h:1-x"}) {
    EXPECT_EQ(ParsePorts(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(AddressTest, TargetsAreReturnedAsTheyAreWritten) {
  const auto targets = ParseTargets(" node-1:7070, [::1]:7071,,10.0.0.1:7070");
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(*targets, (std::vector<std::string>{"node-1:7070", "[::1]:7071", "10.0.0.1:7070"}));
  EXPECT_TRUE(ParseTargets("")->empty());
}

TEST(AddressTest, TargetsThatNoConnectionCanBeMadeToAreRefusedByName) {
  for (const std::string wrong :
       {"127.0.0.1", "http://h:7070", "h:0", ":7070", "h:70000", "::1:7070"}) {
    const absl::Status status = ParseTargets("a:1," + wrong).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong;
    EXPECT_NE(std::string(status.message()).find("'" + wrong + "'"), std::string::npos) << status;
  }
  EXPECT_EQ(ParseTargets("a:1,b:1,a:1").status().message(),
            "address 'a:1' is there twice, expected each server once");
}

}  // namespace
}  // namespace thalweg::address_test
