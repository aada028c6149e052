// A run of bytes in one or more pieces, with whatever keeps them alive: how received or encoded
// gradient data travels between rooms without being copied and without naming gRPC.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace thalweg {

// Move-only in spirit, copyable cheaply: copies share the bytes. Thread-compatible; the bytes are
// immutable once a Payload refers to them. Piece boundaries may fall anywhere, also inside an
// element.
struct Payload {
  std::vector<std::span<const std::byte>> pieces;
  // Keeps every piece alive. Shared because one encoded result is sent to all nodes of a round.
  std::shared_ptr<const void> owner;

  Payload() = default;
  Payload(std::span<const std::byte> bytes, std::shared_ptr<const void> keep_alive)
      : pieces{bytes}, owner(std::move(keep_alive)) {}

  size_t SizeBytes() const {
    size_t total = 0;
    for (const auto& piece : pieces) total += piece.size();
    return total;
  }
};

}  // namespace thalweg
