// These benchmarks write a snapshot of 256 MB to a file in the folder of TMPDIR, and read it again,
// beside a plain file of as many bytes. A file that has just been written is read from memory, so
// that reading measures what a shard does beside its disk.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "server/snapshot/snapshot_file.h"

namespace thalweg {
namespace {

constexpr uint64_t kChunkElems = 256 << 10;  // with moments 3 MiB
constexpr uint64_t kChunks = 84;
constexpr uint64_t kBytes = kChunks * kChunkElems * 3 * sizeof(float);

// A folder that is removed with what is in it.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() / absl::StrCat("snapshot-bench-", getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string PathOf(const char* name) const { return path_ / name; }

 private:
  const std::filesystem::path path_;
};

bool WriteSnapshot(const std::string& path) {
  const std::vector<float> values(kChunkElems, 0.5F);
  const SnapshotHeader header{
      .job = "bench", .identity = std::string(32, 'i'), .num_shards = 1, .num_chunks = kChunks};
  auto file = SnapshotFile::Create(path, header);
  bool ok = file.ok();
  for (uint32_t chunk = 0; ok && chunk < kChunks; ++chunk) {
    ok = file->Add({{0, 0, 0}, chunk, {values, {values, values}, 1}}).ok();
  }
  return ok && file->Commit().ok();
}

bool WritePlain(const std::string& path) {
  const std::vector<float> values(3 * kChunkElems, 0.5F);
  const auto bytes = static_cast<ssize_t>(values.size() * sizeof(float));
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
  bool ok = fd >= 0;
  for (uint64_t chunk = 0; ok && chunk < kChunks; ++chunk) {
    ok = write(fd, values.data(), static_cast<size_t>(bytes)) == bytes;
  }
  ok = ok && fsync(fd) == 0;
  if (fd >= 0) close(fd);
  return ok;
}

void Count(benchmark::State& state) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * kBytes));
}

void BM_Write(benchmark::State& state, bool (*write)(const std::string& path)) {
  const Folder folder;
  for (auto _ : state) {
    if (!write(folder.PathOf("file"))) return state.SkipWithError("cannot write");
  }
  Count(state);
}
BENCHMARK_CAPTURE(BM_Write, snapshot, &WriteSnapshot)->UseRealTime();
BENCHMARK_CAPTURE(BM_Write, plain, &WritePlain)->UseRealTime();

void BM_ReadSnapshot(benchmark::State& state) {
  const Folder folder;
  const std::string path = folder.PathOf("file");
  if (!WriteSnapshot(path)) return state.SkipWithError("cannot write");
  for (auto _ : state) {
    if (!ReadSnapshot(path).ok()) return state.SkipWithError("cannot read");
  }
  Count(state);
}
BENCHMARK(BM_ReadSnapshot)->UseRealTime();

}  // namespace
}  // namespace thalweg
