#include "server/net/test_certificates.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>

namespace thalweg {
namespace {

// Ends the test at once: without certificates it cannot continue.
void Require(bool done) {
  if (!done) throw std::runtime_error("OpenSSL or the file system refuses a test's certificate");
}

std::string NewFolder() {
  std::string folder = ::testing::TempDir() + "/certificates-XXXXXX";
  Require(mkdtemp(folder.data()) != nullptr);
  return folder;
}

void AddExtension(X509* certificate, int id, const std::string& value) {
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, id, value.c_str());
  Require(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

X509* MakeCertificate(const std::string& name, EVP_PKEY* key, absl::Duration valid) {
  static int64_t serial = 0;
  X509* certificate = X509_new();
  Require(X509_set_version(certificate, X509_VERSION_3) == 1);
  ASN1_INTEGER_set_int64(X509_get_serialNumber(certificate), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate), absl::ToInt64Seconds(valid));
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return certificate;
}

void WriteCertificate(const std::string& path, X509* certificate) {
  FILE* file = std::fopen(path.c_str(), "w");
  Require(file != nullptr);
  Require(PEM_write_X509(file, certificate) == 1 && std::fclose(file) == 0);
}

void WriteKey(const std::string& path, EVP_PKEY* key) {
  FILE* file = std::fopen(path.c_str(), "w");
  Require(file != nullptr);
  Require(PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  Require(std::fclose(file) == 0);
}

}  // namespace

struct TestCa::Signer {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = MakeCertificate("Thalweg test CA", key, absl::Hours(48));
  ~Signer() {
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
};

TestCa::TestCa() : folder_(NewFolder()), signer_(std::make_unique<Signer>()) {
  X509_set_issuer_name(signer_->certificate, X509_get_subject_name(signer_->certificate));
  AddExtension(signer_->certificate, NID_basic_constraints, "critical,CA:TRUE");
  Require(X509_sign(signer_->certificate, signer_->key, EVP_sha256()) > 0);
  WriteCertificate(folder_ + "/ca.crt", signer_->certificate);
}

TestCa::~TestCa() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

TlsFiles TestCa::Issue(const std::string& name, absl::Duration valid) const {
  return Write(name, "IP:127.0.0.1", valid);
}

TlsFiles TestCa::IssueFor(const std::string& host) const {
  return Write(host, "DNS:" + host, absl::Hours(1));
}

TlsFiles TestCa::IssueWith(const std::string& name, const std::string& alternatives) const {
  return Write(name, alternatives, absl::Hours(1));
}

TlsFiles TestCa::Write(const std::string& name, const std::string& alternatives,
                       absl::Duration valid) const {
  const TlsFiles files{folder_ + "/" + name + ".crt", folder_ + "/" + name + ".key",
                       folder_ + "/ca.crt"};
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = MakeCertificate(name, key, valid);
  X509_set_issuer_name(certificate, X509_get_subject_name(signer_->certificate));
  AddExtension(certificate, NID_subject_alt_name, alternatives);
  Require(X509_sign(certificate, signer_->key, EVP_sha256()) > 0);
  WriteCertificate(files.cert, certificate);
  WriteKey(files.key, key);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return files;
}

}  // namespace thalweg
