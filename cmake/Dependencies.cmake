# Third-party libraries all come from Debian 12 (scripts/setup installs them); none is vendored.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(spdlog REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)

if(THALWEG_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
endif()

if(THALWEG_SERVER)
  find_package(Protobuf REQUIRED)
  find_package(gRPC CONFIG REQUIRED)
  find_package(prometheus-cpp CONFIG REQUIRED)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
  find_package(OpenSSL REQUIRED)
  pkg_check_modules(HTTPLIB REQUIRED IMPORTED_TARGET cpp-httplib)
endif()

# A sanitizer has an allocator of its own, and its builds have no programs.
if(THALWEG_SERVER AND NOT THALWEG_SANITIZE)
  pkg_check_modules(JEMALLOC IMPORTED_TARGET jemalloc)
  if(NOT JEMALLOC_FOUND)
    message(FATAL_ERROR "The server programs need jemalloc, and pkg-config finds none: install "
                        "libjemalloc-dev, as scripts/setup does, or name its folder in "
                        "PKG_CONFIG_PATH. THALWEG_SERVER=OFF builds no programs")
  endif()
endif()
