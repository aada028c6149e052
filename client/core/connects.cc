#include "client/core/connects.h"

#include <atomic>

namespace thalweg {
namespace {

std::atomic<uint64_t> cancelled{0};

}  // namespace

void CancelConnects() { ++cancelled; }

uint64_t CancelledConnects() { return cancelled; }

}  // namespace thalweg
