// Loopback is a server on this machine, and a node's end of a connection to it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "server/transport/node/remote_shard.h"
#include "server/transport/shard/shard_server.h"
#include "server/transport/testing/recording_shard.h"

namespace thalweg {

class Loopback : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ShardServer::Start({.listen = "127.0.0.1:0"}, shard_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    remote_ = RemoteShard::Create(server_->address(), {}, metrics_);
  }

  MetricRegistry metrics_;
  RecordingShard shard_;
  const std::shared_ptr<RecordingEvents> events_ = std::make_shared<RecordingEvents>();
  std::unique_ptr<ShardServer> server_;
  std::unique_ptr<RemoteShard> remote_;
};

}  // namespace thalweg
