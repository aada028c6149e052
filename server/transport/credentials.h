// This header makes gRPC credentials: mutual TLS, or none.
#pragma once

#include <memory>

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Both return insecure credentials when no files are given. With files, both ends present a
// certificate and verify the other's against the CA; a client also verifies that the certificate
// names the dialled host. Replaced files take effect within a second for new connections; open
// connections keep theirs.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files);
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsFiles& files);

}  // namespace thalweg
