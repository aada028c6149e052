// KeptTlsFiles holds what certificate files had when they could last be served with.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "server/net/tls_files.h"

namespace thalweg {

// gRPC aborts the process when a file that it watches is empty, as files are while they are
// written. It and others read the copies that are kept here instead: in memory, always whole, and
// replaced at once. Thread-safe.
class KeptTlsFiles {
 public:
  // InvalidArgument: see CheckTlsFiles. Where no files are given, there are none here either.
  static absl::StatusOr<std::unique_ptr<KeptTlsFiles>> Open(const TlsFiles& files);

  // The copies' paths, for this process. Certificate and key are one file. They are there as long
  // as this object is.
  const TlsFiles& copies() const { return copies_; }

  // Reads the files again if it has not done so for a second. What is wrong with a new content is
  // logged once, when it has been read twice, and the copies stay as they are.
  void Refresh(TimePoint now);

 private:
  struct Texts {
    std::string cert, key, ca;
    bool operator==(const Texts&) const = default;
  };
  explicit KeptTlsFiles(const TlsFiles& files) : files_(files) {}

  Texts Read() const;
  // Returns why programs cannot serve with these texts, naming the files that have them.
  absl::Status Check(const Texts& texts) const;
  absl::Status Keep(const Texts& texts);

  const TlsFiles files_;
  UniqueFd own_, ca_;
  TlsFiles copies_;

  Mutex mutex_;
  Texts kept_ ABSL_GUARDED_BY(mutex_);
  Texts wrong_ ABSL_GUARDED_BY(mutex_);    // the latest that could not be kept
  int times_ ABSL_GUARDED_BY(mutex_) = 0;  // how often in a row these were read
  TimePoint last_read_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace thalweg
