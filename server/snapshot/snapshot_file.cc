#include "server/snapshot/snapshot_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/snapshot/crc32c.h"
#include "server/snapshot/record_fields.h"

namespace thalweg {
namespace {

constexpr char kMagic[8] = {'T', 'H', 'W', 'S', 'N', 'A', 'P', '\n'};
constexpr uint32_t kVersion = 1;
// A chunk of 4 MiB in bf16 has 24 MiB with its moments, and layouts take 32 MiB at most.
constexpr uint64_t kMaxRecordBytes = 64 << 20;

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

absl::Status Failed(const std::string& what, const std::string& path, int error) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  return absl::Status(is_full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal,
                      absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error)));
}

std::string RecordOf(const SnapshotHeader& header) {
  FieldWriter writer;
  writer.Add(header.job);
  writer.Add(header.identity);
  writer.Add(header.id.branch);
  writer.Add(header.id.step);
  writer.Add(header.shard);
  writer.Add(header.num_shards);
  writer.Add(header.chunk_bytes);
  writer.Add(header.shares);
  writer.Add(uint64_t{header.buckets.size()});
  for (const auto& [id, description] : header.buckets) {
    for (const uint32_t number : {id.index, id.generation, id.part}) writer.Add(number);
    writer.Add(description);
  }
  writer.Add(header.num_chunks);
  return writer.record();
}

bool Parse(std::string_view record, SnapshotHeader& header) {
  FieldReader reader(record);
  reader.Read(header.job);
  reader.Read(header.identity);
  reader.Read(header.id.branch);
  reader.Read(header.id.step);
  reader.Read(header.shard);
  reader.Read(header.num_shards);
  reader.Read(header.chunk_bytes);
  reader.Read(header.shares);
  constexpr size_t kLeastBucketBytes = 3 * sizeof(uint32_t) + sizeof(uint64_t);
  for (size_t left = reader.ReadLength(kLeastBucketBytes); left > 0; --left) {
    BucketId id;
    for (uint32_t* number : {&id.index, &id.generation, &id.part}) reader.Read(*number);
    reader.Read(header.buckets[id]);
  }
  reader.Read(header.num_chunks);
  return reader.IsWhole();
}

std::string RecordOf(const SnapshotChunk& chunk) {
  FieldWriter writer;
  const BucketId& id = chunk.bucket;
  for (const uint32_t number : {id.index, id.generation, id.part, chunk.chunk}) writer.Add(number);
  writer.Add(chunk.weights.steps);
  writer.Add(chunk.weights.params);
  for (const auto& moment : chunk.weights.moments) writer.Add(moment);
  return writer.record();
}

bool Parse(std::string_view record, SnapshotChunk& chunk) {
  FieldReader reader(record);
  BucketId& id = chunk.bucket;
  for (uint32_t* number : {&id.index, &id.generation, &id.part, &chunk.chunk}) {
    reader.Read(*number);
  }
  reader.Read(chunk.weights.steps);
  reader.Read(chunk.weights.params);
  const size_t elems = chunk.weights.params.size();
  bool fits = true;
  for (auto& moment : chunk.weights.moments) {
    reader.Read(moment);
    fits = fits && (moment.empty() || moment.size() == elems);
  }
  return fits && reader.IsWhole();
}

class Reader {
 public:
  static absl::StatusOr<Reader> Open(const std::string& path) {
    File file(std::fopen(path.c_str(), "rbe"), std::fclose);
    if (file == nullptr && errno == ENOENT) {
      return absl::NotFoundError(absl::StrCat("there is no ", path));
    }
    if (file == nullptr) return Failed("open", path, errno);
    return Reader(path, std::move(file));
  }

  absl::StatusOr<SnapshotHeader> ReadHeader() {
    char magic[sizeof kMagic];
    uint32_t version = 0;
    if (!Read(magic, sizeof magic) || std::memcmp(magic, kMagic, sizeof magic) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(path_, " is not a snapshot of Thalweg's"));
    }
    if (!Read(&version, sizeof version)) return CutOff();
    if (version != kVersion) {
      return absl::FailedPreconditionError(
          absl::StrCat(path_, " is a snapshot of version ", version, ", expected ", kVersion));
    }
    SnapshotHeader header;
    THALWEG_RETURN_IF_ERROR(ReadRecord(header));
    return header;
  }

  absl::StatusOr<SnapshotChunk> ReadChunk() {
    SnapshotChunk chunk;
    THALWEG_RETURN_IF_ERROR(ReadRecord(chunk));
    return chunk;
  }

  absl::Status CheckEnd() {
    char more = 0;
    return Read(&more, 1) ? Damaged("bytes after its last record") : absl::OkStatus();
  }

 private:
  Reader(std::string path, File file) : path_(std::move(path)), file_(std::move(file)) {}

  bool Read(void* to, size_t bytes) { return std::fread(to, 1, bytes, file_.get()) == bytes; }

  template <typename Message>
  absl::Status ReadRecord(Message& message) {
    uint64_t size = 0;
    uint32_t checksum = 0;
    if (!Read(&size, sizeof size) || !Read(&checksum, sizeof checksum)) return CutOff();
    if (size > kMaxRecordBytes) return Damaged(absl::StrCat("a record of ", size, " bytes"));
    std::string record(size, '\0');
    if (!Read(record.data(), size)) return CutOff();
    if (Crc32c(record) != checksum) return Damaged("a record with another checksum than its own");
    if (!Parse(record, message)) return Damaged("a record that cannot be parsed");
    return absl::OkStatus();
  }
  absl::Status CutOff() const {
    return absl::DataLossError(absl::StrCat(path_, " is cut off: it ends within a record"));
  }
  absl::Status Damaged(const std::string& what) const {
    return absl::DataLossError(absl::StrCat(path_, " is damaged: it has ", what));
  }

  std::string path_;
  File file_;
};

}  // namespace

absl::StatusOr<SnapshotFile> SnapshotFile::Create(const std::string& path,
                                                  const SnapshotHeader& header) {
  const std::string unfinished = path + kUnfinished;
  File file(std::fopen(unfinished.c_str(), "wbe"), std::fclose);
  if (file == nullptr) return Failed("create", unfinished, errno);
  SnapshotFile made(path, std::move(file));
  FieldWriter first;
  first.Add(kVersion);
  THALWEG_RETURN_IF_ERROR(made.Write(std::string(kMagic, sizeof kMagic) + first.record()));
  THALWEG_RETURN_IF_ERROR(made.WriteRecord(RecordOf(header)));
  return made;
}

SnapshotFile::~SnapshotFile() {
  if (file_ != nullptr) unlink((path_ + kUnfinished).c_str());
}

absl::Status SnapshotFile::Add(const SnapshotChunk& chunk) { return WriteRecord(RecordOf(chunk)); }

absl::Status SnapshotFile::WriteRecord(const std::string& record) {
  FieldWriter before;
  before.Add(uint64_t{record.size()});
  before.Add(Crc32c(record));
  THALWEG_RETURN_IF_ERROR(Write(before.record()));
  return Write(record);
}

absl::Status SnapshotFile::Write(const std::string& bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) {
    return Failed("write", path_ + kUnfinished, errno);
  }
  bytes_ += bytes.size();
  return absl::OkStatus();
}

absl::Status SnapshotFile::Commit() {
  const std::string unfinished = path_ + kUnfinished;
  if (std::fflush(file_.get()) != 0 || fsync(fileno(file_.get())) != 0) {
    return Failed("write", unfinished, errno);
  }
  if (std::rename(unfinished.c_str(), path_.c_str()) != 0) {
    return Failed("rename", unfinished, errno);
  }
  file_.reset();
  return SyncFolderOf(path_);
}

absl::Status SyncFolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Failed("open", folder, errno);
  const int error = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  return error == 0 ? absl::OkStatus() : Failed("sync", folder, error);
}

absl::StatusOr<SnapshotHeader> ReadSnapshotHeader(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(Reader reader, Reader::Open(path));
  return reader.ReadHeader();
}

absl::StatusOr<Snapshot> ReadSnapshot(const std::string& path) {
  THALWEG_ASSIGN_OR_RETURN(Reader reader, Reader::Open(path));
  Snapshot snapshot;
  THALWEG_ASSIGN_OR_RETURN(snapshot.header, reader.ReadHeader());
  for (uint64_t i = 0; i < snapshot.header.num_chunks; ++i) {
    THALWEG_ASSIGN_OR_RETURN(SnapshotChunk chunk, reader.ReadChunk());
    snapshot.chunks.push_back(std::move(chunk));
  }
  THALWEG_RETURN_IF_ERROR(reader.CheckEnd());
  return snapshot;
}

}  // namespace thalweg
