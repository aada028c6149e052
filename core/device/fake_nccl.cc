// These are libraries for nccl_library_test.cc: NCCL as far as loading inspects it, of a version
// that CMake sets, complete or with only ncclGetVersion.

// NOLINTBEGIN(readability-identifier-naming): NCCL's names.
#pragma GCC visibility push(default)
extern "C" {

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}

#if FAKE_NCCL_IS_WHOLE
int ncclCommInitAll() { return 1; }
int ncclCommDestroy() { return 1; }
int ncclCommAbort() { return 1; }
int ncclCommGetAsyncError() { return 1; }
int ncclGroupStart() { return 1; }
int ncclGroupEnd() { return 1; }
int ncclReduce() { return 1; }
int ncclBroadcast() { return 1; }
const char* ncclGetErrorString() { return "fake"; }
const char* ncclGetLastError() { return "fake"; }
#endif

}  // extern "C"
#pragma GCC visibility pop
// NOLINTEND(readability-identifier-naming)
