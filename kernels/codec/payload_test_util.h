// This header makes payloads in pieces for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/base/payload.h"

namespace thalweg {

using Bytes = std::vector<std::byte>;

// Returns `bytes` cut into pieces of the given lengths and a last one with the rest; each piece is
// an allocation of its own, so that AddressSanitizer sees a read beyond it.
inline Payload Split(const Bytes& bytes, const std::vector<size_t>& lengths) {
  auto owner = std::make_shared<std::vector<Bytes>>();
  size_t begin = 0;
  for (size_t length : lengths) {
    const size_t end = std::min(bytes.size(), begin + length);
    owner->emplace_back(bytes.begin() + static_cast<ptrdiff_t>(begin),
                        bytes.begin() + static_cast<ptrdiff_t>(end));
    begin = end;
  }
  owner->emplace_back(bytes.begin() + static_cast<ptrdiff_t>(begin), bytes.end());
  Payload payload;
  for (const Bytes& piece : *owner) payload.pieces.emplace_back(piece);
  payload.owner = std::move(owner);
  return payload;
}

// Returns lengths below `limit`, a quarter of them 0, that add up to at least `total`.
inline std::vector<size_t> RandomLengths(size_t total, size_t limit, std::mt19937_64& random) {
  std::vector<size_t> lengths;
  for (size_t sum = 0; sum < total; sum += lengths.back()) {
    lengths.push_back(random() % 4 == 0 ? 0 : random() % limit);
  }
  return lengths;
}

}  // namespace thalweg
