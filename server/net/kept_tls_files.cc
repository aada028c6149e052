#include "server/net/kept_tls_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"
#include "server/base/text_file.h"
#include "spdlog/spdlog.h"

namespace thalweg {
namespace {

constexpr Duration kReadInterval = std::chrono::seconds(1);
constexpr int kTimesWrong = 2;  // in a row, until something is said

std::string PathOf(const UniqueFd& file) { return absl::StrCat("/proc/self/fd/", file.get()); }

absl::StatusOr<UniqueFd> FileOf(const std::string& text) {
  UniqueFd file(memfd_create("thalweg-tls", MFD_CLOEXEC));
  if (file.get() < 0 ||
      write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot keep a certificate in memory: ", std::strerror(errno)));
  }
  return file;
}

// Whoever opens the path of `place` from now on finds this text.
absl::Status Replace(UniqueFd& place, const std::string& text) {
  THALWEG_ASSIGN_OR_RETURN(UniqueFd file, FileOf(text));
  if (place.get() < 0) {
    place = std::move(file);
  } else if (dup3(file.get(), place.get(), O_CLOEXEC) < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot replace a certificate in memory: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<KeptTlsFiles>> KeptTlsFiles::Open(const TlsFiles& files) {
  std::unique_ptr<KeptTlsFiles> kept(new KeptTlsFiles(files));
  THALWEG_RETURN_IF_ERROR(CheckTlsFiles(files));
  if (!files.enabled()) return kept;
  const Texts texts = kept->Read();
  THALWEG_RETURN_IF_ERROR(kept->Check(texts));
  THALWEG_RETURN_IF_ERROR(kept->Keep(texts));
  kept->copies_ = {PathOf(kept->own_), PathOf(kept->own_), PathOf(kept->ca_)};
  MutexLock lock(kept->mutex_);
  kept->kept_ = texts;
  return kept;
}

void KeptTlsFiles::Refresh(TimePoint now) {
  if (!files_.enabled()) return;
  MutexLock lock(mutex_);
  if (now - last_read_ < kReadInterval) return;
  last_read_ = now;
  const Texts texts = Read();
  absl::Status status = texts == kept_ ? absl::OkStatus() : Check(texts);
  if (status.ok() && texts != kept_) status = Keep(texts);
  if (status.ok()) {
    if (texts != kept_) spdlog::info("the certificate files, '{}', have changed", files_.cert);
    kept_ = wrong_ = texts;
    times_ = 0;
    return;
  }
  // It is tried again and again: its dates may come, or memory. Files are replaced one after the
  // other, so what does not fit yet is not spoken of at once.
  times_ = texts == wrong_ ? times_ + 1 : 1;
  wrong_ = texts;
  if (times_ == kTimesWrong) {
    spdlog::error("{}; the certificates stay as they were", Text(status));
  }
}

KeptTlsFiles::Texts KeptTlsFiles::Read() const {
  // What cannot be read has no certificate either.
  const auto text_of = [](const std::string& path) { return ReadTextFile(path).value_or(""); };
  return {text_of(files_.cert), text_of(files_.key), text_of(files_.ca)};
}

absl::Status KeptTlsFiles::Check(const Texts& texts) const {
  THALWEG_ASSIGN_OR_RETURN(const UniqueFd cert, FileOf(texts.cert));
  THALWEG_ASSIGN_OR_RETURN(const UniqueFd key, FileOf(texts.key));
  THALWEG_ASSIGN_OR_RETURN(const UniqueFd ca, FileOf(texts.ca));
  const TlsFiles copies = {PathOf(cert), PathOf(key), PathOf(ca)};
  const absl::Status status = CheckTlsFiles(copies);
  return {status.code(), absl::StrReplaceAll(status.message(), {{copies.cert, files_.cert},
                                                                {copies.key, files_.key},
                                                                {copies.ca, files_.ca}})};
}

absl::Status KeptTlsFiles::Keep(const Texts& texts) {
  THALWEG_RETURN_IF_ERROR(Replace(own_, absl::StrCat(texts.cert, "\n", texts.key)));
  return Replace(ca_, texts.ca);
}

}  // namespace thalweg
