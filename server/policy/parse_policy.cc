#include "server/policy/parse_policy.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/protocol.h"
#include "core/base/status_macros.h"
#include "server/base/printable.h"
#include "thalweg/v1/policy.pb.h"

namespace thalweg {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::TextFormat;

// Returns the error at a place that protobuf counts from 0.
absl::Status At(const std::string& path, int line, int column, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ":", line + 1, ":", column + 1, ": ", what));
}

// Keeps the first error.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  explicit FirstError(std::string path) : path_(std::move(path)) {}
  const absl::Status& status() const { return status_; }

  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (status_.ok()) status_ = At(path_, line, column, Printable(message, kMaxReasonBytes));
  }

 private:
  const std::string path_;
  absl::Status status_;
};

// A TenantReader checks one tenant of the text and copies it.
class TenantReader {
 public:
  TenantReader(const std::string& path, const v1::Tenant& tenant,
               const TextFormat::ParseLocation& place, TextFormat::ParseInfoTree& fields)
      : path_(path), tenant_(tenant), place_(place), fields_(fields) {}

  absl::StatusOr<Tenant> Read(std::set<std::string>& names) {
    if (const absl::Status status = CheckName("tenant's name", tenant_.name()); !status.ok()) {
      return Wrong("name", -1, std::string(status.message()));
    }
    if (!names.insert(tenant_.name()).second) {
      return Wrong("name", -1, absl::StrCat("a second tenant '", tenant_.name(), "'"));
    }
    Tenant read{.name = tenant_.name()};
    THALWEG_ASSIGN_OR_RETURN(read.spiffe_ids, Patterns("spiffe_id", tenant_.spiffe_id()));
    THALWEG_ASSIGN_OR_RETURN(read.dns_names, Patterns("dns_name", tenant_.dns_name()));
    THALWEG_ASSIGN_OR_RETURN(read.common_names, Patterns("common_name", tenant_.common_name()));
    THALWEG_ASSIGN_OR_RETURN(read.jobs, Patterns("job", tenant_.job()));
    if (read.spiffe_ids.empty() && read.dns_names.empty() && read.common_names.empty()) {
      return Lacks("certificates: expected a spiffe_id, dns_name or common_name");
    }
    if (read.jobs.empty()) return Lacks("jobs: expected a job");
    if (tenant_.has_max_jobs()) read.max_jobs = tenant_.max_jobs();
    if (tenant_.has_max_memory_bytes()) read.max_memory_bytes = tenant_.max_memory_bytes();
    return read;
  }

 private:
  absl::StatusOr<std::vector<std::string>> Patterns(
      const char* field, const google::protobuf::RepeatedPtrField<std::string>& texts) {
    for (int i = 0; i < texts.size(); ++i) {
      if (!IsPrintable(texts[i]) || !IsPattern(texts[i])) {
        return Wrong(field, i,
                     absl::StrCat(field, " '", Printable(texts[i], kMaxNameBytes),
                                  "': expected a text with at most one *, at its beginning or "
                                  "end"));
      }
    }
    return std::vector<std::string>(texts.begin(), texts.end());
  }

  absl::Status Wrong(const char* field, int index, const std::string& what) {
    const FieldDescriptor* descriptor = v1::Tenant::descriptor()->FindFieldByName(field);
    const TextFormat::ParseLocation at = fields_.GetLocation(descriptor, index);
    return at.line < 0 ? Lacks(what) : At(path_, at.line, at.column, what);
  }
  absl::Status Lacks(const std::string& what) {
    return At(
        path_, place_.line, place_.column,
        absl::StrCat("tenant '", Printable(tenant_.name(), kMaxNameBytes), "' has no ", what));
  }

  const std::string& path_;
  const v1::Tenant& tenant_;
  const TextFormat::ParseLocation place_;
  TextFormat::ParseInfoTree& fields_;
};

}  // namespace

absl::StatusOr<Policy> ParsePolicy(const std::string& text, const std::string& path) {
  FirstError error(path);
  TextFormat::ParseInfoTree places;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  parser.WriteLocationsTo(&places);
  v1::Policy parsed;
  if (!parser.ParseFromString(text, &parsed)) return error.status();
  // With no tenant nobody could join anything, which is what an empty file would say by accident.
  if (parsed.tenant().empty()) return At(path, 0, 0, "expected at least one tenant");
  const FieldDescriptor* tenants = v1::Policy::descriptor()->FindFieldByName("tenant");
  std::set<std::string> names;
  Policy policy;
  for (int i = 0; i < parsed.tenant_size(); ++i) {
    TenantReader reader(path, parsed.tenant(i), places.GetLocation(tenants, i),
                        *places.GetTreeForNested(tenants, i));
    THALWEG_ASSIGN_OR_RETURN(Tenant tenant, reader.Read(names));
    policy.tenants.push_back(std::move(tenant));
  }
  return policy;
}

}  // namespace thalweg
