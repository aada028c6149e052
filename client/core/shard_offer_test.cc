#include "client/core/shard_offer.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>

#include "client/core/testing/open_sockets.h"
#include "core/base/testing/test_patience.h"
#include "core/base/thread.h"
#include "core/ipc/listener.h"

namespace thalweg::shard_offer_test {
namespace {

TEST(ShardOfferTest, ForkedChildDoesNotKeepTheOfferOpen) {
  char folder[] = "/tmp/thalweg-test-XXXXXX";
  const std::string path = std::string(mkdtemp(folder)) + "/socket";
  auto listener = Listener::Bind(path);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::shared_ptr<Connection> sidecar;
  Thread answers("answers", [&] {
    auto accepted = (*listener)->Accept();
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    sidecar = *std::move(accepted);
    EXPECT_TRUE(sidecar->Receive(Now() + kTestPatience).ok());
    EXPECT_TRUE(sidecar->Send(ipc::ShardHosted{.address = "host:1", .aggregators = {}}).ok());
  });
  const auto offer = ShardOffer::Ask(path, "job", "secret", kTestPatience);
  answers.Join();
  ASSERT_TRUE(offer.ok()) << offer.status();
  EXPECT_EQ(OpenSocketsOfChild(), OpenSockets() - 1);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace thalweg::shard_offer_test
