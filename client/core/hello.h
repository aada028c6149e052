// What a worker says first to its sidecar.
#pragma once

#include "client/core/session_options.h"
#include "core/ipc/message.h"

namespace thalweg {

// Returns the message of a worker with those options, without what it offers of a device's memory.
ipc::Hello MakeHello(const SessionOptions& options);

}  // namespace thalweg
