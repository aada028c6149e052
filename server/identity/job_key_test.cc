#include "server/identity/job_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/escaping.h"

namespace thalweg::job_key_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Vector {
  const char* secret;
  const char* public_key;
  const char* message;
  const char* signature;
};

// RFC 8032, section 7.1, tests 1 to 3
constexpr Vector kVectors[] = {
    {"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
     "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
     "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9"
     "b46bd25bf5f0595bbe24655141438e7a100b"},
    {"4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
     "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
     "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f1"
     "1d8c387b2eaeb4302aeeb00d291612bb0c00"},
    {"c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
     "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
     "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984d"
     "c6594a7c15e9716ed28dc027beceea1ec40a"},
};

std::shared_ptr<const JobKey> KeyOf(const std::string& secret) {
  const auto key = JobKey::FromHex(secret);
  EXPECT_TRUE(key.ok()) << key.status();
  return *key;
}

TEST(JobKeyTest, KeysAndSignaturesAreThoseOfTheRfc) {
  for (const Vector& vector : kVectors) {
    const auto key = KeyOf(vector.secret);
    const std::string message = absl::HexStringToBytes(vector.message);
    EXPECT_EQ(absl::BytesToHexString(key->public_key()), vector.public_key);
    EXPECT_EQ(absl::BytesToHexString(key->Sign(message)), vector.signature);
    EXPECT_TRUE(Verify(absl::HexStringToBytes(vector.public_key), message,
                       absl::HexStringToBytes(vector.signature)));
  }
}

TEST(JobKeyTest, SecretMayHaveCapitalDigits) {
  EXPECT_EQ(KeyOf(std::string(64, 'A'))->public_key(), KeyOf(std::string(64, 'a'))->public_key());
}

TEST(JobKeyTest, SignatureCountsForItsMessageAndItsKeyOnly) {
  const auto key = KeyOf(kVectors[0].secret);
  const auto other = KeyOf(kVectors[1].secret);
  const std::string signature = key->Sign("join");
  EXPECT_TRUE(Verify(key->public_key(), "join", signature));
  EXPECT_FALSE(Verify(key->public_key(), "joiN", signature));
  EXPECT_FALSE(Verify(key->public_key(), "", signature));
  EXPECT_FALSE(Verify(other->public_key(), "join", signature));
  for (size_t i = 0; i < signature.size(); ++i) {
    std::string forged = signature;
    forged[i] ^= 1;
    EXPECT_FALSE(Verify(key->public_key(), "join", forged)) << i;
  }
}

TEST(JobKeyTest, KeysAndSignaturesOfOtherSizesVerifyNothing) {
  const auto key = KeyOf(kVectors[0].secret);
  const std::string signature = key->Sign("join");
  for (size_t size : {0, 1, 31, 33, 64}) {
    std::string sized = key->public_key();
    sized.resize(size);
    EXPECT_FALSE(Verify(sized, "join", signature)) << size;
  }
  for (size_t size : {0, 1, 63, 65, 128}) {
    std::string sized = signature;
    sized.resize(size);
    EXPECT_FALSE(Verify(key->public_key(), "join", sized)) << size;
  }
  // This is no point of the curve: there is no x for y = 2.
  EXPECT_FALSE(Verify('\x02' + std::string(31, '\0'), "join", signature));
}

TEST(JobKeyTest, MalformedSecretIsRefusedWithoutBeingRepeated) {
  const auto refusal = [](const std::string& secret) {
    const absl::Status status = JobKey::FromHex(secret).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(""), HasSubstr("got 0"));
  EXPECT_THAT(refusal(std::string(63, 'c')), HasSubstr("64 hexadecimal digits, got 63"));
  EXPECT_THAT(refusal(std::string(65, 'c')), HasSubstr("got 65"));
  EXPECT_THAT(refusal(std::string(63, 'c') + "\xe4"), HasSubstr("no such digits"));
  EXPECT_THAT(refusal("zzzz" + std::string(60, 'c')), Not(HasSubstr("zz")));
  EXPECT_THAT(refusal("zzzz" + std::string(60, 'c')), Not(HasSubstr("cccc")));
}

}  // namespace
}  // namespace thalweg::job_key_test
