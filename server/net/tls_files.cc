#include "server/net/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/free_with.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

using Bio = std::unique_ptr<BIO, FreeWith<BIO_free>>;
using Certificate = std::unique_ptr<X509, FreeWith<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;

absl::StatusOr<Bio> Open(const std::string& path) {
  Bio file(BIO_new_file(path.c_str(), "r"));
  ERR_clear_error();
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("cannot read '", path, "'"));
  }
  return file;
}

absl::StatusOr<std::vector<Certificate>> ReadCertificates(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(const Bio file, Open(path));
  std::vector<Certificate> certificates;
  while (auto* certificate = PEM_read_bio_X509(file.get(), nullptr, nullptr, nullptr)) {
    certificates.emplace_back(certificate);
  }
  // At the end of the file OpenSSL reports "no start line"; any other error is a broken
  // certificate.
  const bool whole = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates.empty() || !whole) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': expected certificates in PEM, got ",
                     certificates.empty() ? "none" : "one that cannot be read"));
  }
  return certificates;
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm fields{};
  ASN1_TIME_to_tm(time, &fields);
  return absl::FromTM(fields, absl::UTCTimeZone());
}

absl::Status CheckDates(const std::string& path, const X509* certificate) {
  const absl::Time now = absl::Now();
  const absl::Time first = ToTime(X509_get0_notBefore(certificate));
  const absl::Time last = ToTime(X509_get0_notAfter(certificate));
  if (first <= now && now <= last) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "'", path, "': the certificate is valid from ", absl::FormatTime(first, absl::UTCTimeZone()),
      " to ", absl::FormatTime(last, absl::UTCTimeZone()), ", and ",
      now > last ? "has expired: put a new one in its place"
                 : "not yet: is this host's clock right?"));
}

absl::Status CheckKey(const TlsFiles& files, const X509* certificate) {
  THALWEG_ASSIGN_OR_RETURN(const Bio file, Open(files.key));
  // The callback returns no password; without it OpenSSL would ask at the terminal.
  const auto no_password = [](char*, int, int, void*) { return 0; };
  const Key key(PEM_read_bio_PrivateKey(file.get(), nullptr, no_password, nullptr));
  const bool fits = key != nullptr && X509_check_private_key(certificate, key.get()) == 1;
  ERR_clear_error();
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      key == nullptr
          ? absl::StrCat("'", files.key, "': expected a private key in PEM, not encrypted")
          : absl::StrCat("'", files.key, "' is not the key of the certificate in '", files.cert,
                         "'"));
}

Gauge& ExpiryGauge(MetricRegistry& metrics, const std::string& certificate) {
  return metrics.GetGauge("thalweg_tls_certificate_expiry_timestamp_seconds",
                          "When the first of the certificates in a file expires, in Unix time: the "
                          "program's own, or those of its CAs",
                          {{"certificate", certificate}});
}

void Show(const std::string& path, Gauge& gauge) {
  const auto expiry = EarliestExpiry(path);
  if (expiry.ok()) {
    gauge.Set(static_cast<double>(absl::ToUnixSeconds(*expiry)));
  } else {
    spdlog::warn("{}", Text(expiry.status()));
  }
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  const std::vector<std::pair<const char*, const std::string*>> all = {
      {"certificate", &files.cert}, {"key", &files.key}, {"CA", &files.ca}};
  const auto given = [](const auto& file) { return !file.second->empty(); };
  if (std::none_of(all.begin(), all.end(), given)) return absl::OkStatus();
  for (const auto& file : all) {
    if (!given(file)) {
      return absl::InvalidArgumentError(
          absl::StrCat("TLS needs three files, certificate, key and CA: there is no ", file.first));
    }
  }
  THALWEG_ASSIGN_OR_RETURN(const auto own, ReadCertificates(files.cert));
  THALWEG_RETURN_IF_ERROR(CheckDates(files.cert, own.front().get()));
  THALWEG_RETURN_IF_ERROR(CheckKey(files, own.front().get()));
  return ReadCertificates(files.ca).status();
}

absl::StatusOr<absl::Time> EarliestExpiry(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(const auto certificates, ReadCertificates(path));
  absl::Time earliest = absl::InfiniteFuture();
  for (const Certificate& certificate : certificates) {
    earliest = std::min(earliest, ToTime(X509_get0_notAfter(certificate.get())));
  }
  return earliest;
}

CertificateExpiry::CertificateExpiry(const TlsFiles& files, MetricRegistry& metrics)
    : files_(files), own_(ExpiryGauge(metrics, "own")), ca_(ExpiryGauge(metrics, "ca")) {
  Refresh();
}

void CertificateExpiry::Refresh() {
  Show(files_.cert, own_);
  Show(files_.ca, ca_);
}

}  // namespace thalweg
