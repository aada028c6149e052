#include "core/exchange/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace thalweg::collective_test {
namespace {

using ::testing::HasSubstr;

constexpr WireFormat kDense = WireFormat::kFloat16;

TEST(CollectiveTest, DefaultIsTheMeanOfAllForAll) {
  EXPECT_EQ(ToString(kMeanOfAll), "mean from all to all");
  EXPECT_TRUE(Validate(kMeanOfAll, kDense).ok());
  EXPECT_TRUE(kMeanOfAll.to.Has(7));
}

TEST(CollectiveTest, PlacesWithNodesOfAllKindsAreValid) {
  const std::vector<std::pair<Collective, std::string>> cases = {
      {{Place::All(), Place::One(3), Fold::kSum}, "sum from all to node 3"},
      {{Place::All(), Place::All(), Fold::kProduct}, "product from all to all"},
      {{Place::One(0), Place::All(), Fold::kNone}, "bytes from node 0 to all"},
      {{Place::One(0), Place::One(2), Fold::kNone}, "bytes from node 0 to node 2"},
      {{Place::None(), Place::None(), Fold::kNone}, "bytes from none to none"},
  };
  for (const auto& [collective, text] : cases) {
    EXPECT_EQ(ToString(collective), text);
    EXPECT_TRUE(Validate(collective, kDense).ok()) << text;
  }
}

TEST(CollectiveTest, PlaceOfOneHasNoOther) {
  EXPECT_TRUE(Place::One(3).Has(3));
  EXPECT_FALSE(Place::One(3).Has(2));
  EXPECT_FALSE(Place::None().Has(0));
}

TEST(CollectiveTest, WhatTheShardHasGoesToAll) {
  EXPECT_TRUE(Validate(kPull, kDense).ok());
  EXPECT_EQ(ToString(kPull), "bytes from none to all");
}

TEST(CollectiveTest, WhatCannotBeIsRefusedSayingWhy) {
  const std::vector<std::pair<Collective, std::string>> cases = {
      {{Place::All(), Place::All(), Fold::kNone},
       "there is no collective 'bytes from all to all': values from all need a fold"},
      {{Place::One(1), Place::All(), Fold::kSum}, "those from one have none"},
      {{Place::None(), Place::None(), Fold::kMean}, "there is nothing to fold"},
      {{Place::None(), Place::One(1), Fold::kNone}, "expected two places with nodes"},
      {{Place::None(), Place::All(), Fold::kSum}, "expected two places with nodes"},
      {{Place::All(), Place::None(), Fold::kMean}, "expected two places with nodes"},
      {{Place{static_cast<Place::Kind>(3), 0}, Place::All(), Fold::kMean},
       "from an unknown place to all"},
      {{Place::All(), Place::All(), static_cast<Fold>(9)}, "fold 9 is unknown"},
      {{Place::All(), Place::All(), Fold::kBitXor}, "fp16 has no integers"},
  };
  for (const auto& [collective, why] : cases) {
    const absl::Status status = Validate(collective, kDense);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
}

TEST(CollectiveTest, LossyFormatsHaveTheMeanAndPassAsBytes) {
  EXPECT_TRUE(Validate(kMeanOfAll, WireFormat::kInt8).ok());
  EXPECT_TRUE(Validate({Place::One(0), Place::All(), Fold::kNone}, WireFormat::kInt8).ok());
  EXPECT_THAT(
      std::string(Validate({Place::All(), Place::All(), Fold::kSum}, WireFormat::kInt8).message()),
      HasSubstr("int8 folds to the mean only"));
}

TEST(CollectiveTest, GroupIsDescribedByItsNodes) {
  EXPECT_EQ(ToString(Group{3, {{0, 2}, {4, 1}}}),
            "group 3 (node 0 with 2 workers, node 4 with 1 worker; window 0)");
}

}  // namespace
}  // namespace thalweg::collective_test
