#include "server/sidecar/codec/parameter_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace thalweg::parameter_states_test {
namespace {

using ::testing::HasSubstr;

using Floats = std::vector<float>;

ParameterStates Example() {
  ParameterStates states;
  states["a"] = std::make_shared<ParameterState>(
      ParameterState{Floats{1, 2, 3, 4}, {5, 6}, 7, {8, 9, 10, 11}});
  states["layer.weight"] = std::make_shared<ParameterState>(ParameterState{Floats{-1}, {}, 0, {}});
  return states;
}

std::vector<std::byte> Bytes(const ParameterStates& states) {
  std::vector<std::byte> bytes(EncodedBytes(states));
  Encode(states, bytes);
  return bytes;
}

bool Same(const ParameterStates& a, const ParameterStates& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, state] : a) {
    const auto other = b.find(name);
    if (other == b.end() || state->residual != other->second->residual ||
        state->factor != other->second->factor || state->rounds != other->second->rounds ||
        state->shard_residual != other->second->shard_residual) {
      return false;
    }
  }
  return true;
}

TEST(ParameterStatesTest, SurviveTheRoundTrip) {
  for (const ParameterStates& states : {Example(), ParameterStates{}}) {
    const auto back = DecodeParameterStates(Bytes(states));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(Same(*back, states));
  }
}

TEST(ParameterStatesTest, EveryTruncationIsRefused) {
  const auto bytes = Bytes(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeParameterStates(std::span(bytes).first(size)).ok()) << size;
  }
}

TEST(ParameterStatesTest, ForeignAndSurplusBytesAreRefused) {
  auto bytes = Bytes(Example());
  bytes.push_back(std::byte{0});
  EXPECT_THAT(std::string(DecodeParameterStates(bytes).status().message()), HasSubstr("too many"));
  bytes[0] = std::byte{'X'};
  EXPECT_THAT(std::string(DecodeParameterStates(bytes).status().message()), HasSubstr("no codec"));
}

TEST(ParameterStatesTest, StatesOfAnEarlierReleaseAreRefused) {
  auto bytes = Bytes(Example());
  ASSERT_EQ(bytes[3], std::byte{'3'});
  bytes[3] = std::byte{'2'};
  EXPECT_THAT(std::string(DecodeParameterStates(bytes).status().message()),
              HasSubstr("in units of a loss scale that it does not name"));
}

TEST(ParameterStatesTest, ResidualsAreSavedInTrueUnits) {
  ParameterStates states = Example();
  states["a"]->loss_scale = 4;
  ToTrueUnits(states);
  const auto back = DecodeParameterStates(Bytes(states));
  ASSERT_TRUE(back.ok()) << back.status();
  const ParameterState& loaded = *back->at("a");
  EXPECT_EQ(loaded.residual, (std::vector<float>{0.25f, 0.5f, 0.75f, 1}));
  EXPECT_EQ(loaded.factor, (std::vector<float>{5, 6}));
  EXPECT_EQ(loaded.loss_scale, kNoLossScale);
  // Nobody knows of which scale these were, if of any.
  EXPECT_EQ(back->at("layer.weight")->residual, (std::vector<float>{-1}));
}

TEST(ParameterStatesTest, MutatedBytesNeverDoHarm) {
  const auto good = Bytes(Example());
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = good;
    for (uint64_t flips = 1 + random() % 4; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    const auto states = DecodeParameterStates(bytes);
    // An accepted state encodes to the same again.
    if (states.ok()) {
      EXPECT_LE(EncodedBytes(*states), bytes.size());
    }
  }
}

TEST(ParameterStatesTest, ReplacingKeepsAddressesAndRefusesOtherSizes) {
  ParameterStates states = Example();
  const auto address = states["a"];
  ParameterStates loaded;
  loaded["a"] = std::make_shared<ParameterState>(ParameterState{Floats{9, 8, 7, 6}, {}, 3, {}});
  loaded["new"] = std::make_shared<ParameterState>(ParameterState{Floats{1}, {}, 3, {}});
  ASSERT_TRUE(Replace(states, std::move(loaded)).ok());
  EXPECT_EQ(states["a"], address);
  EXPECT_EQ(address->residual, (std::vector<float>{9, 8, 7, 6}));
  EXPECT_EQ(states.count("new"), 1u);
  // What the loaded states do not name begins anew.
  const auto other = states["new"];
  ASSERT_TRUE(Replace(states, {}).ok());
  EXPECT_EQ(states["new"], other);
  EXPECT_EQ(other->rounds, 0u);
  EXPECT_EQ(other->residual, (std::vector<float>{0}));

  ParameterStates wrong;
  wrong["a"] = std::make_shared<ParameterState>(ParameterState{Floats{1, 2}, {}, 3, {}});
  EXPECT_THAT(std::string(Replace(states, std::move(wrong)).message()),
              HasSubstr("'a' has 4 elements, its codec state 2"));
  EXPECT_EQ(address->residual.size(), 4u);
}

}  // namespace
}  // namespace thalweg::parameter_states_test
