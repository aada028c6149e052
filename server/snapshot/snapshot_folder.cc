#include "server/snapshot/snapshot_folder.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"
#include "server/base/log.h"

namespace thalweg {
namespace {

namespace fs = std::filesystem;

constexpr char kEnding[] = ".snapshot";
constexpr char kSetAside[] = ".over-";  // and a number, after the name of a job's folder
constexpr size_t kIdentityDigits = 64;  // of an Ed25519 public key

std::optional<SnapshotId> IdOf(const fs::path& path) {
  if (path.extension() != kEnding) return std::nullopt;
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(path.stem().string(), absl::MaxSplits('-', 1));
  SnapshotId id;
  if (!absl::SimpleAtoi(parts.first, &id.branch) || !absl::SimpleAtoi(parts.second, &id.step)) {
    return std::nullopt;
  }
  return id;
}

// Returns the paths in a folder. NotFound: there is none; other errors: it cannot be read.
absl::StatusOr<std::vector<fs::path>> PathsIn(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    paths.push_back(entry->path());
  }
  if (!error) return paths;
  return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot list ", folder.string()));
}

// Says in the log why a folder is left alone, unless it has gone.
void WarnOf(const absl::Status& unreadable) {
  if (!absl::IsNotFound(unreadable)) spdlog::warn("{}; left alone for now", Text(unreadable));
}

// Does the same, or returns none and says why in the log.
std::vector<fs::path> ReadablePathsIn(const fs::path& folder) {
  absl::StatusOr<std::vector<fs::path>> paths = PathsIn(folder);
  if (paths.ok()) return *std::move(paths);
  WarnOf(paths.status());
  return {};
}

bool IsUnfinished(const fs::path& path) {
  return path.extension() == kUnfinished && IdOf(path.parent_path() / path.stem());
}

bool IsIdentity(const std::string& name) {
  return name.size() == kIdentityDigits && absl::c_all_of(name, absl::ascii_isxdigit);
}

bool WasSetAside(const std::string& name) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(name, absl::MaxSplits(kSetAside, 1));
  return IsIdentity(parts.first) && absl::c_all_of(parts.second, absl::ascii_isdigit) &&
         !parts.second.empty();
}

// Returns the folders of jobs whose names `fit`, with nothing but snapshots in them. What else lies
// there is somebody else's.
std::vector<fs::path> JobFolders(const std::string& path, bool (&fit)(const std::string&)) {
  std::vector<fs::path> found;
  for (const fs::path& folder : ReadablePathsIn(path)) {
    std::error_code error;
    if (!fit(folder.filename().string()) || !fs::is_directory(fs::symlink_status(folder, error))) {
      continue;
    }
    const auto files = PathsIn(folder);
    if (!files.ok()) {
      WarnOf(files.status());
    } else if (absl::c_all_of(*files, [](const auto& f) { return IdOf(f) || IsUnfinished(f); })) {
      found.push_back(folder);
    }
  }
  return found;
}

// Returns when something was last written into a folder or its files; nothing: it is unknown.
std::optional<fs::file_time_type> LastWritten(const fs::path& folder) {
  std::error_code error;
  fs::file_time_type last = fs::last_write_time(folder, error);
  const auto files = PathsIn(folder);
  if (error || !files.ok()) return std::nullopt;
  for (const fs::path& file : *files) {
    if (!error) last = std::max(last, fs::last_write_time(file, error));
  }
  if (error) return std::nullopt;
  return last;
}

// Returns the folders of jobs to which nothing has been added for long.
std::vector<fs::path> ForgottenFolders(const std::string& path) {
  std::vector<fs::path> found;
  for (const fs::path& folder : JobFolders(path, IsIdentity)) {
    const std::optional<fs::file_time_type> written = LastWritten(folder);
    if (!written || fs::file_time_type::clock::now() - *written < SnapshotFolder::kForgottenAfter) {
      continue;
    }
    spdlog::info("removing {}: no snapshot has been written there for {} days", folder.string(),
                 SnapshotFolder::kForgottenAfter / std::chrono::hours(24));
    found.push_back(folder);
  }
  return found;
}

void RemoveUnfinished(const std::string& path) {
  for (const fs::path& folder : JobFolders(path, IsIdentity)) {
    for (const fs::path& file : ReadablePathsIn(folder)) {
      std::error_code ignored;
      if (IsUnfinished(file)) fs::remove(file, ignored);
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotFolder>> SnapshotFolder::Open(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  const std::string lock_path = path + "/lock";
  const int lock =
      error ? -1 : open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (lock < 0) {
    return absl::InternalError(absl::StrCat("cannot keep snapshots in ", path, ": ",
                                            error ? error.message() : std::strerror(errno)));
  }
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    close(lock);
    return absl::FailedPreconditionError(absl::StrCat("another aggregator keeps its snapshots in ",
                                                      path, ": give each a folder of its own"));
  }
  for (const fs::path& forgotten : ForgottenFolders(path)) RemoveSetAside(forgotten);
  RemoveUnfinished(path);
  for (const fs::path& over : JobFolders(path, WasSetAside)) RemoveSetAside(over);
  return std::unique_ptr<SnapshotFolder>(new SnapshotFolder(path, lock));
}

SnapshotFolder::~SnapshotFolder() { close(lock_); }

std::string SnapshotFolder::FolderOf(const std::string& identity) const {
  return absl::StrCat(path_, "/", absl::BytesToHexString(identity));
}

std::string SnapshotFolder::PathOf(const std::string& identity, const SnapshotId& id) const {
  return absl::StrCat(FolderOf(identity), "/", id.branch, "-", id.step, kEnding);
}

absl::StatusOr<SnapshotFile> SnapshotFolder::Create(const SnapshotHeader& header) {
  const std::string folder = FolderOf(header.identity);
  std::error_code ignored;
  fs::create_directories(path_, ignored);  // somebody may have removed it
  // Other users of the machine have no business with a job's weights.
  if (mkdir(folder.c_str(), S_IRWXU) == 0) {
    THALWEG_RETURN_IF_ERROR(SyncFolderOf(folder));
  } else if (errno != EEXIST) {
    return absl::InternalError(absl::StrCat("cannot make ", folder, ": ", std::strerror(errno)));
  }
  return SnapshotFile::Create(PathOf(header.identity, header.id), header);
}

std::vector<SnapshotHeader> SnapshotFolder::List(const std::string& identity) {
  std::vector<SnapshotHeader> found;
  const std::string folder = FolderOf(identity);
  const auto paths = PathsIn(folder);
  NoteRead(folder, paths.status());
  if (!paths.ok()) return found;
  for (const fs::path& path : *paths) {
    const std::optional<SnapshotId> id = IdOf(path);
    if (!id) continue;
    {
      MutexLock lock(mutex_);
      if (refused_.contains(path)) continue;
    }
    absl::StatusOr<SnapshotHeader> header = ReadSnapshotHeader(path);
    if (header.ok() && (header->identity != identity || header->id != *id)) {
      header = absl::FailedPreconditionError(
          absl::StrCat(path.string(), " is ", ToString(header->id), " of job '", header->job,
                       "' with another secret, or has been renamed"));
    }
    if (absl::IsDataLoss(header.status()) || absl::IsFailedPrecondition(header.status())) {
      Refuse(path, header.status());
    } else {
      NoteRead(path, header.status());
    }
    if (header.ok()) found.push_back(*std::move(header));
  }
  std::sort(found.begin(), found.end(),
            [](const SnapshotHeader& a, const SnapshotHeader& b) { return a.id < b.id; });
  return found;
}

absl::StatusOr<SnapshotHeader> SnapshotFolder::ReadHeader(const std::string& identity,
                                                          const SnapshotId& id) {
  return ReadSnapshotHeader(PathOf(identity, id));
}

absl::StatusOr<Snapshot> SnapshotFolder::Read(const std::string& identity, const SnapshotId& id) {
  const std::string path = PathOf(identity, id);
  absl::StatusOr<Snapshot> snapshot = ReadSnapshot(path);
  if (absl::IsDataLoss(snapshot.status())) Refuse(path, snapshot.status());
  return snapshot;
}

void SnapshotFolder::Refuse(const std::string& path, const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (!refused_.insert(path).second) return;
  }
  spdlog::warn("{}; the snapshot before it is used", Text(why));
}

void SnapshotFolder::NoteRead(const std::string& path, const absl::Status& status) {
  MutexLock lock(mutex_);
  if (status.ok() || absl::IsNotFound(status)) {
    unread_.erase(path);
  } else if (unread_.insert(path).second) {
    spdlog::warn("{}; left out for now", Text(status));
  }
}

void SnapshotFolder::Remove(const std::string& identity, const SnapshotId& id) {
  std::error_code error;
  const std::string path = PathOf(identity, id);
  if (!fs::remove(path, error) && error) {
    spdlog::warn("cannot remove the snapshot {}: {}", path, error.message());
  }
}

std::vector<std::string> SnapshotFolder::Forgotten() const {
  std::vector<std::string> identities;
  for (const fs::path& folder : ForgottenFolders(path_)) {
    identities.push_back(absl::HexStringToBytes(folder.filename().string()));
  }
  return identities;
}

void SnapshotFolder::Prune(const std::string& identity, const std::optional<SnapshotId>& common) {
  const std::vector<SnapshotHeader> all = List(identity);
  for (size_t i = 0; i + 2 < all.size(); ++i) {
    // The first of those before `common` that is kept is the last of them.
    const bool is_fallback = common && all[i].id < *common && !(all[i + 1].id < *common);
    if (!is_fallback && all[i].id != common) Remove(identity, all[i].id);
  }
}

void SnapshotFolder::DropLater(const std::string& identity, const SnapshotId& id) {
  for (const SnapshotHeader& each : List(identity)) {
    if (id < each.id) Remove(identity, each.id);
  }
}

std::string SnapshotFolder::SetAside(const std::string& identity) {
  const std::string folder = FolderOf(identity);
  MutexLock lock(mutex_);
  const std::string aside = absl::StrCat(folder, kSetAside, ++set_aside_);
  std::error_code error;
  fs::rename(folder, aside, error);
  if (!error) {
    const auto was_there = [&](const std::string& path) { return path.starts_with(folder); };
    std::erase_if(refused_, was_there);
    std::erase_if(unread_, was_there);
    return aside;
  }
  if (error != std::errc::no_such_file_or_directory) {
    spdlog::warn("cannot remove {}: {}", folder, error.message());
  }
  return "";
}

void SnapshotFolder::RemoveSetAside(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) spdlog::warn("cannot remove {}: {}", path, error.message());
}

}  // namespace thalweg
