// TlsFiles are the certificate files of a program. They may be replaced while it runs.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/metrics.h"

namespace thalweg {

// The members are paths of PEM files; either all or none are given.
struct TlsFiles {
  std::string cert;  // the program's certificate, then the chain to a CA
  std::string key;   // its private key, not encrypted
  std::string ca;    // the CA certificates that verify peers

  bool enabled() const { return !cert.empty(); }
};

// Checks that a program can serve with the files; OK also when none is given. InvalidArgument names
// the file that is missing, unreadable or not PEM, the key that belongs to another certificate, or
// the certificate that is not valid now, with its dates.
absl::Status CheckTlsFiles(const TlsFiles& files);

// Returns when the first of the certificates in `path` expires. InvalidArgument names the file.
absl::StatusOr<absl::Time> EarliestExpiry(const std::string& path);

// A CertificateExpiry exports thalweg_tls_certificate_expiry_timestamp_seconds.
class CertificateExpiry {
 public:
  // Calls Refresh. `metrics` must outlive this object.
  CertificateExpiry(const TlsFiles& files, MetricRegistry& metrics);
  // Reads the files again; a file that cannot be read leaves its value unchanged. Thread-safe.
  void Refresh();

 private:
  const TlsFiles files_;
  Gauge& own_;
  Gauge& ca_;
};

}  // namespace thalweg
