// The certificates of a program, as files that may be replaced while it runs.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/metrics.h"

namespace thalweg {

// Paths of PEM files: all are given, or none.
struct TlsFiles {
  std::string cert;  // the program's own certificate, then those that lead from it to a CA
  std::string key;   // of that certificate, not encrypted
  std::string ca;    // the certificates by which peers' are judged

  bool enabled() const { return !cert.empty(); }
};

// Whether a program can serve with them: Ok also when none is given. InvalidArgument names the file
// that is missing, unreadable or no PEM, the key that is another certificate's, and the certificate
// that is not valid now, with its dates.
absl::Status CheckTlsFiles(const TlsFiles& files);

// When the first of the certificates in `path` expires. InvalidArgument names the file.
absl::StatusOr<absl::Time> EarliestExpiry(const std::string& path);

// Exports thalweg_tls_certificate_expiry_timestamp_seconds.
class CertificateExpiry {
 public:
  // Refreshes. `metrics` must outlive this.
  CertificateExpiry(const TlsFiles& files, MetricRegistry& metrics);
  // Reads the files again. One that cannot be read leaves its value as it was. Thread-safe.
  void Refresh();

 private:
  const TlsFiles files_;
  Gauge& own_;
  Gauge& ca_;
};

}  // namespace thalweg
