#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "server/aggregator/job_test_util.h"

namespace thalweg::job_letters_test {
namespace {

using ::testing::HasSubstr;

Contribution LetterTo(uint32_t from, uint32_t to, size_t bytes, uint64_t number = 1) {
  Contribution letter{{LettersOf(from), 0, number},
                      1,
                      WireFormat::kDenseUInt8,
                      bytes,
                      Split(Bytes(bytes, std::byte{7}), {})};
  letter.collective = {Place::One(from), Place::One(to), Fold::kNone};
  return letter;
}

TEST(JobLettersTest, LetterReachesItsNodeAtOnceAndNobodyElse) {
  TestJob job({1, 1, 1});
  const Contribution letter = LetterTo(0, 2, 100);
  ASSERT_TRUE(job.job().Contribute(0, letter, Now()).ok());
  EXPECT_TRUE(job.sink(0).results.empty());
  EXPECT_TRUE(job.sink(1).results.empty());
  ASSERT_EQ(job.sink(2).results.size(), 1u);
  EXPECT_EQ(job.sink(2).results[0].id, letter.id);
  EXPECT_EQ(BytesOf(job.sink(2).results[0].payload), BytesOf(letter.payload));
}

TEST(JobLettersTest, LetterThatCannotGoFailsTheJobNamingItsSender) {
  std::vector<std::pair<Contribution, std::string>> cases = {
      {LetterTo(1, 0, 4), "no way that it can go"}, {LetterTo(0, 2, 4), "no way that it can go"},
      {LetterTo(0, 1, 4), "no way that it can go"}, {LetterTo(0, 1, 4), "expected at most"},
      {LetterTo(0, 1, 4), "expected at most"},      {LetterTo(0, 1, 64 << 20), "expected at most"},
  };
  cases[2].first.collective.to = Place::All();
  cases[3].first.wire = WireFormat::kFloat32;
  cases[4].first.elems = 5;
  for (const auto& [letter, why] : cases) {
    TestJob job({1, 1});
    const absl::Status refused = job.job().Contribute(0, letter, Now());
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                ::testing::AllOf(HasSubstr("node 0 (host0)"), HasSubstr(why)));
    EXPECT_THAT(std::string(job.sink(1).failures.at(0).message()), HasSubstr(why));
  }
}

TEST(JobLettersTest, OfLettersToANodeThatHasLeftOnlyReceiptsDoNoHarm) {
  TestJob job({1, 1, 1});
  job.job().RemoveMember(2, absl::OkStatus());
  EXPECT_TRUE(job.job().Contribute(0, LetterTo(0, 2, 4, /*number=*/0), Now()).ok());
  EXPECT_TRUE(job.sink(1).failures.empty());
  EXPECT_FALSE(job.job().Contribute(0, LetterTo(0, 2, 4), Now()).ok());
  EXPECT_THAT(std::string(job.sink(1).failures.at(0).message()),
              HasSubstr("cannot arrive: node 2 (host2) has left"));
}

TEST(JobLettersTest, LettersThatAreNotTakenAreBounded) {
  TestJob job({1, 1});
  constexpr size_t kBytes = 1024;
  constexpr size_t kOverhead = 512;  // so that empty ones are bounded, too
  const size_t most = 2 * kLetterBytesPerNode / (kBytes + kOverhead);
  for (uint64_t number = 1; number <= most; ++number) {
    ASSERT_TRUE(job.job().Contribute(0, LetterTo(0, 1, kBytes, number), Now()).ok()) << number;
  }
  job.sink(1).results.resize(most / 2);  // the others have been sent
  for (uint64_t number = 1; number <= most / 2; ++number) {
    ASSERT_TRUE(job.job().Contribute(0, LetterTo(0, 1, kBytes, number), Now()).ok()) << number;
  }
  const absl::Status refused = job.job().Contribute(0, LetterTo(0, 1, kBytes, most), Now());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("have not been taken yet"));
}

}  // namespace
}  // namespace thalweg::job_letters_test
