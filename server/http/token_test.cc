#include "server/http/token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace thalweg::token_test {
namespace {

using ::testing::HasSubstr;

std::string Basic(const std::string& credentials) {
  return "Basic " + absl::Base64Escape(credentials);
}

TEST(TokenTest, BearerAndPasswordOfAnyUserAreAccepted) {
  for (const std::string& header : {std::string("Bearer s3:cret"), std::string("bearer s3:cret"),
                                    Basic("anne:s3:cret"), Basic(":s3:cret")}) {
    EXPECT_TRUE(HasToken(header, "s3:cret")) << header;
  }
}

TEST(TokenTest, EverythingElseIsRefused) {
  for (const std::string& header :
       {std::string(), std::string("s3cret"), std::string("Bearer"), std::string("Bearer "),
        std::string("Bearer s3cre"), std::string("Bearer s3crets"), std::string("Bearer s3creT"),
        std::string("Basic %%%"), Basic("s3cret"), Basic("s3cret:"), Basic("anne:other"),
        std::string("Digest s3cret")}) {
    EXPECT_FALSE(HasToken(header, "s3cret")) << header;
  }
}

TEST(TokenTest, FilesAreReadWithoutTheSpaceAround) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/token_test", getpid());
  std::ofstream(path) << "  s3cret\n";
  EXPECT_EQ(ReadToken(path).value(), "s3cret");
  std::ofstream(path) << " \n";
  EXPECT_THAT(std::string(ReadToken(path).status().message()), HasSubstr("got none"));
  for (const std::string unreadable : {"/none", "/tmp"}) {  // the second one is a folder
    EXPECT_THAT(std::string(ReadToken(unreadable).status().message()),
                HasSubstr("'" + unreadable + "': expected a token, cannot read it"));
  }
}

}  // namespace
}  // namespace thalweg::token_test
