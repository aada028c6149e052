// TestCa makes certificates for tests: a CA and the certificates that it signs, as files for
// programs.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "server/net/tls_files.h"

namespace thalweg {

// Each object is a CA of its own. Its files lie in a new folder, which the destructor removes.
class TestCa {
 public:
  TestCa();
  ~TestCa();
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;

  // Returns the files of a certificate for `name`, valid from an hour ago until `valid` from now,
  // for the host 127.0.0.1 only. Another call with the same name replaces them.
  TlsFiles Issue(const std::string& name, absl::Duration valid = absl::Hours(1)) const;
  // Issues a certificate for a host of this DNS name; see Issue.
  TlsFiles IssueFor(const std::string& host) const;
  // Issues one with these alternative names, e.g. "IP:127.0.0.1,URI:spiffe://a/b"; see Issue.
  TlsFiles IssueWith(const std::string& name, const std::string& alternatives) const;
  const std::string& folder() const { return folder_; }

 private:
  struct Signer;
  TlsFiles Write(const std::string& name, const std::string& alternatives,
                 absl::Duration valid) const;

  const std::string folder_;
  const std::unique_ptr<Signer> signer_;
};

}  // namespace thalweg
