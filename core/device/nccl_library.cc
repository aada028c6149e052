#include "core/device/nccl_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"

namespace thalweg {
namespace {

// Versions are numbered as ncclGetVersion does from 2.9 on.
constexpr int kOldest = 21800;
constexpr int kFirstTooNew = 22900;

constexpr char kNeeded[] =
    "workers of a node on several GPUs need NCCL 2.18 to 2.28: install nvidia-nccl-cu13==2.28.9 "
    "(pip) and let THALWEG_NCCL_LIBRARY name its libnccl.so.2, or LD_LIBRARY_PATH the folder";

// Returns the file that the function comes from: the requested path may be a bare name.
std::string FileOf(void* function, const std::string& path) {
  Dl_info info;
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : path;
}

class Loader {
 public:
  Loader(void* library, const std::string& path) : library_(library), path_(path) {}

  template <class Function>
  absl::Status Find(const char* name, Function** function) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("NCCL: ", path_, " has no function ", name, "; ", kNeeded));
    }
    *function = reinterpret_cast<Function*>(found);
    return absl::OkStatus();
  }

 private:
  void* const library_;
  const std::string& path_;
};

absl::Status CheckVersion(const Loader& loader, const std::string& path) {
  int (*get_version)(int*) = nullptr;
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclGetVersion", &get_version));
  int version = 0;
  const int result = get_version(&version);
  if (result != kNcclSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL: ncclGetVersion of ", path, " returned ", result, "; ", kNeeded));
  }
  if (version < kOldest || version >= kFirstTooNew) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL: ", FileOf(reinterpret_cast<void*>(get_version), path), " is version ",
                     NcclVersionName(version), "; ", kNeeded));
  }
  return absl::OkStatus();
}

}  // namespace

std::string NcclVersionName(int version) {
  const int major_unit = version < 10000 ? 1000 : 10000;  // up to 2.8 it was 1000
  return absl::StrCat(version / major_unit, ".", version % major_unit / 100, ".", version % 100);
}

absl::StatusOr<NcclApi> LoadNccl(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("NCCL: cannot load ", path, " (", dlerror(), "); ", kNeeded));
  }
  const Loader loader(library, path);
  THALWEG_RETURN_IF_ERROR(CheckVersion(loader, path));
  NcclApi api;
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclCommInitAll", &api.comm_init_all));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclCommDestroy", &api.comm_destroy));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclCommAbort", &api.comm_abort));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclCommGetAsyncError", &api.comm_get_async_error));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclGroupStart", &api.group_start));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclGroupEnd", &api.group_end));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclReduce", &api.reduce));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclBroadcast", &api.broadcast));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclGetErrorString", &api.get_error_string));
  THALWEG_RETURN_IF_ERROR(loader.Find("ncclGetLastError", &api.get_last_error));
  return api;
}

}  // namespace thalweg
