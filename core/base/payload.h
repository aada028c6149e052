// A Payload is a sequence of bytes in one or more pieces, with the owner that keeps them alive.
// Received or encoded gradients travel between rooms in it without copies and without a dependency
// on gRPC.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace thalweg {

// Copies are cheap and share the bytes. A Payload is thread-compatible; the bytes are immutable
// once a Payload refers to them. Piece boundaries may fall anywhere, also inside an element.
struct Payload {
  std::vector<std::span<const std::byte>> pieces;
  // Keeps every piece alive. It is shared because one encoded result is sent to all nodes of a
  // round.
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
