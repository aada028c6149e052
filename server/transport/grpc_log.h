// This header is about what gRPC itself logs.
#pragma once

namespace thalweg {

// Sends what gRPC logs to our log, for the whole process. Strangers can cause gRPC's errors as
// often as they like, so only some of them are logged (LogLimit). Idempotent.
void RouteGrpcLog();

}  // namespace thalweg
