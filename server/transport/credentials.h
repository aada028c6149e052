// Who may speak to whom over gRPC: mutual TLS, or everybody.
#pragma once

#include <memory>

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Without TLS when no files are given. With them, both ends show a certificate and check the
// other's against the CA, and a client also that it names the host that was dialled. Files that are
// replaced count for connections opened a second later; those that are open live on.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files);
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsFiles& files);

}  // namespace thalweg
