#include "server/transport/credentials.h"

#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace thalweg {
namespace {

namespace tls = ::grpc::experimental;

constexpr unsigned kRefreshSeconds = 1;

void Watch(const TlsFiles& files, tls::TlsCredentialsOptions& options) {
  options.set_certificate_provider(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.cert, files.ca, kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  options.watch_root_certs();
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureServerCredentials();
  tls::TlsServerCredentialsOptions options(nullptr);
  Watch(files, options);
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return tls::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureChannelCredentials();
  tls::TlsChannelCredentialsOptions options;
  Watch(files, options);
  return tls::TlsCredentials(options);
}

}  // namespace thalweg
