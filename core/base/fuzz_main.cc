// Runs a fuzz target on files: the corpus, in which each crash that was found has stayed. If it is
// told for how many seconds, it runs the target instead on inputs that it makes from those files at
// random, without looking at which code they reach: number n follows from the files, seed and n.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/fuzzing.h"

namespace thalweg {
namespace {

using Random = std::mt19937_64;

constexpr size_t kMostBytes = 1 << 14;
constexpr unsigned kMostSeconds = 20;  // for one input

void Try(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

// Returns a number below `end`, which is not 0.
size_t Below(size_t end, Random& random) { return random() % end; }

// Changes the input in one place.
void Change(std::string& input, const std::vector<std::string>& files, Random& random) {
  constexpr auto kTelling = std::to_array<uint64_t>(
      {0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 1 << 16, 0x7fffffff, 0xffffffff, ~uint64_t{0}});
  const size_t at = Below(input.size() + 1, random);
  const size_t length = std::min<size_t>(input.size() - at, 1 + Below(16, random));
  switch (Below(6, random)) {
    case 0:
      if (length > 0) input[at] = static_cast<char>(input[at] ^ (1 << Below(8, random)));
      return;
    case 1:
      input.erase(at, length);
      return;
    case 2:
      input.insert(at, input.substr(at, length));
      return;
    case 3: {
      const uint64_t value = kTelling[Below(kTelling.size(), random)];
      const size_t bytes = std::min(length, size_t{1} << Below(4, random));
      input.replace(at, bytes, reinterpret_cast<const char*>(&value), bytes);
      return;
    }
    case 4:
      if (length > 0) input[at] = static_cast<char>(random());
      return;
    default: {
      const std::string& other = files[Below(files.size(), random)];
      const size_t from = Below(other.size() + 1, random);
      input.replace(at, std::string::npos, other, from, std::string::npos);
    }
  }
}

std::string Make(const std::vector<std::string>& files, unsigned long long seed,
                 unsigned long long n) {
  std::seed_seq both{seed, n};
  Random random(both);
  std::string input = files[Below(files.size(), random)];
  for (size_t changes = 1 + Below(8, random); changes > 0; --changes) {
    Change(input, files, random);
    if (input.size() > kMostBytes) input.resize(kMostBytes);
  }
  return input;
}

// Tries inputs in another process, so that this one lives on when an input ends it.
int TryMade(const std::vector<std::string>& files, double seconds, unsigned long long seed) {
  using Count = std::atomic<unsigned long long>;
  void* shared =
      mmap(nullptr, sizeof(Count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return std::perror("mmap"), 2;
  Count& tried = *new (shared) Count(0);
  const pid_t child = fork();
  if (child < 0) return std::perror("fork"), 2;
  if (child == 0) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (; std::chrono::steady_clock::now() < end; ++tried) {
      alarm(kMostSeconds);
      Try(Make(files, seed, tried));
    }
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::printf("%llu inputs made with seed %llu\n", tried.load(), seed);
  if (status == 0) return 0;
  const std::string path = absl::StrCat("broken-", seed, "-", tried.load());
  std::ofstream(path, std::ios::binary) << Make(files, seed, tried);
  const bool hangs = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
  std::printf("%s; the last input is in %s\n", hangs ? "it takes too long" : "a promise is broken",
              path.c_str());
  return 1;
}

int TryFiles(const std::vector<std::string>& paths, const std::vector<std::string>& files) {
  for (size_t i = 0; i < files.size(); ++i) {
    std::printf("%s: %zu bytes\n", paths[i].c_str(), files[i].size());
    std::fflush(stdout);  // names the file if the target ends the process
    Try(files[i]);
  }
  std::printf("%zu files\n", files.size());
  return files.empty() ? 1 : 0;
}

int Main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "usage: %s FOLDER [SECONDS SEED]\n", argv[0]);
    return 2;
  }
  std::vector<std::string> paths;
  for (const auto& file : std::filesystem::directory_iterator(argv[1]))
    paths.push_back(file.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::ifstream stream(path, std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (argc == 2 || files.empty()) return TryFiles(paths, files);
  return TryMade(files, std::strtod(argv[2], nullptr), std::strtoull(argv[3], nullptr, 10));
}

}  // namespace
}  // namespace thalweg

int main(int argc, char** argv) { return thalweg::Main(argc, argv); }
