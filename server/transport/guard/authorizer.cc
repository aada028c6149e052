#include "server/transport/guard/authorizer.h"

#include <grpc/grpc_security_constants.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "server/base/printable.h"
#include "server/transport/wire/status_codec.h"

namespace thalweg {
namespace {

std::string First(const grpc::AuthContext& context, const char* property) {
  const std::vector<grpc::string_ref> values = context.FindPropertyValues(property);
  return values.empty() ? "" : std::string(values.front().data(), values.front().size());
}

std::string Quoted(const std::string& principal) {
  if (principal.empty()) return "none";
  return absl::StrCat("'", Printable(principal, kMaxNameBytes), "'");
}

}  // namespace

PeerNames NamesOf(const grpc::ServerContextBase& context) {
  PeerNames names;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr) return names;
  names.spiffe_id = First(*auth, GRPC_PEER_SPIFFE_ID_PROPERTY_NAME);
  names.common_name = First(*auth, GRPC_X509_CN_PROPERTY_NAME);
  for (const grpc::string_ref& name : auth->FindPropertyValues(GRPC_PEER_DNS_PROPERTY_NAME)) {
    names.dns_names.emplace_back(name.data(), name.size());
  }
  return names;
}

std::string AddressOf(const grpc::ServerContextBase& context) {
  const std::string peer = context.peer();  // such as ipv4:10.0.0.1:70 or ipv6:%5B::1%5D:70
  return peer.substr(0, peer.rfind(':'));
}

absl::Status Authorizer::CheckOwner(const grpc::ServerContextBase& context,
                                    const std::string& owner) {
  if (owner.empty()) return absl::OkStatus();
  const std::string caller = NamesOf(context).Principal();
  if (caller == owner) return absl::OkStatus();
  const auto why = absl::PermissionDeniedError(
      absl::StrCat("the membership belongs to certificate ", Quoted(owner), ", and the caller has ",
                   Quoted(caller)));
  refusals_.Add(Refusal::kToken, why, Now());
  return why;
}

void Authorizer::NotProved(const grpc::ServerContextBase& context, const absl::Status& why) {
  refusals_.Add(Refusal::kSecret, Prefixed(context.peer(), why), Now());
}

}  // namespace thalweg
