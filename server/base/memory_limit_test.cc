#include "server/base/memory_limit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace thalweg::memory_limit_test {
namespace {

// A root directory with the files that each test writes.
class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ = ::testing::TempDir() +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name() +
                            std::to_string(getpid());
};

TEST_F(MemoryLimitTest, MachineIsTheLimitWithoutGroups) {
  const uint64_t machine = MemoryLimit(root_);
  EXPECT_GT(machine, 0u);
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(MemoryLimit(root_), machine);
  Write("/sys/fs/cgroup/memory.max", "9223372036854771712\n");
  EXPECT_EQ(MemoryLimit(root_), machine);
}

TEST_F(MemoryLimitTest, TightestGroupOnThePathCounts) {
  Write("/proc/self/cgroup", "0::/pod/container\n");
  Write("/sys/fs/cgroup/memory.max", "max\n");
  Write("/sys/fs/cgroup/pod/memory.max", "5000000\n");
  Write("/sys/fs/cgroup/pod/container/memory.max", "7000000\n");
  EXPECT_EQ(MemoryLimit(root_), 5'000'000u);
}

TEST_F(MemoryLimitTest, GroupsOfVersion1Count) {
  Write("/proc/self/cgroup", "7:cpu,cpuacct:/a\n4:memory:/docker/b\nno line of this kind\n");
  Write("/sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "6000000\n");
  EXPECT_EQ(MemoryLimit(root_), 6'000'000u);
}

TEST_F(MemoryLimitTest, LimitOfAContainerLiesAtItsTop) {
  Write("/proc/self/cgroup", "0::/kubepods/unseen\n");
  Write("/sys/fs/cgroup/memory.max", "8000000\n");
  EXPECT_EQ(MemoryLimit(root_), 8'000'000u);
}

}  // namespace
}  // namespace thalweg::memory_limit_test
