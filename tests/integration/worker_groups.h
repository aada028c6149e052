// Workers of a Cluster as a group, for tests of what they say to each other.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/session.h"
#include "gtest/gtest.h"
#include "tests/integration/cluster.h"

namespace thalweg {

inline std::vector<std::unique_ptr<Session>> Connect(Cluster& cluster, bool hosted,
                                                     Duration timeout = std::chrono::seconds(60)) {
  auto connected = cluster.ConnectAll([&](SessionOptions& o) {
    if (hosted) o.shards = cluster.HostedPlaces();
    o.timeout = timeout;
  });
  std::vector<std::unique_ptr<Session>> sessions;
  for (auto& session : connected) {
    EXPECT_TRUE(session.ok()) << session.status();
    sessions.push_back(*std::move(session));
  }
  return sessions;
}

// Makes a group of all workers, with `workers` on each node.
inline void MakeGroup(std::vector<std::unique_ptr<Session>>& sessions, uint32_t number,
                      uint32_t workers) {
  std::vector<uint32_t> nodes(sessions.size());
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) nodes[rank] = rank / workers;
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) {
    const absl::Status made =
        sessions[rank]->MakeGroup({number, rank, nodes, absl::StrCat("group", number)});
    ASSERT_TRUE(made.ok()) << made;
  }
}

using Integers = std::vector<int64_t>;

inline std::future<absl::Status> Begin(Session& session, CollectiveCall call, const Integers& given,
                                       Integers* got) {
  call.dtype = DType::kInt64;
  if (call.timeout == Duration::zero()) call.timeout = std::chrono::seconds(60);
  call.given = {std::as_bytes(std::span(given))};
  if (got != nullptr) call.got = {std::as_writable_bytes(std::span(*got))};
  auto outcome = std::make_shared<std::promise<absl::Status>>();
  session.Collect(std::move(call), [outcome](const absl::Status& s) { outcome->set_value(s); });
  return outcome->get_future();
}

}  // namespace thalweg
