#include "core/device/nccl_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace thalweg::nccl_library_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns the path of one of the libraries that fake_nccl.cc makes.
std::string Fake(const std::string& name) {
  return absl::StrCat(THALWEG_FAKE_NCCL_FOLDER, "/libfake_nccl_", name, ".so");
}

void ExpectRefused(const std::string& path, absl::StatusCode code, const std::string& why) {
  const auto api = LoadNccl(path);
  ASSERT_FALSE(api.ok()) << path;
  EXPECT_EQ(api.status().code(), code) << api.status();
  EXPECT_THAT(std::string(api.status().message()),
              AllOf(HasSubstr(path), HasSubstr(why), HasSubstr("NCCL 2.18 to 2.28"),
                    HasSubstr("nvidia-nccl-cu13"), HasSubstr("THALWEG_NCCL_LIBRARY")));
}

TEST(NcclLibraryTest, LibraryThatIsNotThereIsNamedWithWhatToInstall) {
  ExpectRefused("libnccl-of-nobody.so.2", absl::StatusCode::kNotFound, "cannot open shared object");
}

TEST(NcclLibraryTest, VersionsOutsideTheRangeAreRefused) {
  ExpectRefused(Fake("21799"), absl::StatusCode::kFailedPrecondition, "is version 2.17.99");
  ExpectRefused(Fake("22900"), absl::StatusCode::kFailedPrecondition, "is version 2.29.0");
}

TEST(NcclLibraryTest, FirstAndLastVersionOfTheRangeAreLoaded) {
  for (const char* name : {"21800", "22899"}) {
    const auto api = LoadNccl(Fake(name));
    ASSERT_TRUE(api.ok()) << api.status();
    EXPECT_STREQ(api->get_error_string(1), "fake");
  }
}

TEST(NcclLibraryTest, LibraryWithoutAFunctionIsRefused) {
  ExpectRefused(Fake("partial"), absl::StatusCode::kFailedPrecondition,
                "has no function ncclCommInitAll");
}

TEST(NcclLibraryTest, VersionsAreNamedAsNcclNumbersThem) {
  EXPECT_EQ(NcclVersionName(22809), "2.28.9");
  EXPECT_EQ(NcclVersionName(21805), "2.18.5");
  EXPECT_EQ(NcclVersionName(2804), "2.8.4");
}

TEST(NcclLibraryTest, NcclItselfIsLoadedAndNamesItsErrors) {
  const std::string path = THALWEG_TEST_NCCL;
  if (path.empty()) GTEST_SKIP() << "no libnccl.so.2 in the Python environment of this build";
  const auto api = LoadNccl(path);
  ASSERT_TRUE(api.ok()) << api.status();
  EXPECT_STREQ(api->get_error_string(kNcclSuccess), "no error");
  EXPECT_THAT(api->get_error_string(kNcclInProgress), HasSubstr("in progress"));
}

}  // namespace
}  // namespace thalweg::nccl_library_test
