// A SessionToken is a node's key to its membership on a shard of another machine.
#pragma once

#include <cstdint>

namespace thalweg {

// The shard's end draws it at random and tells only the node, whose calls and streams show it. 0 is
// never valid.
using SessionToken = uint64_t;

}  // namespace thalweg
