# Installs what a C++ program needs to be a worker: the library that connects to a sidecar, its
# headers, and what find_package(thalweg) reads. They are the component `cpp`, which no wheel has.

set(rooms client base device ipc kernels launch)
list(TRANSFORM rooms PREPEND thalweg_)
foreach(room IN LISTS rooms)
  string(REPLACE "thalweg_" "" name ${room})
  set_target_properties(${room} PROPERTIES EXPORT_NAME ${name})
endforeach()
target_compile_features(thalweg_base PUBLIC cxx_std_20)

install(TARGETS ${rooms} EXPORT thalweg-targets ARCHIVE DESTINATION lib COMPONENT cpp)
install(EXPORT thalweg-targets NAMESPACE thalweg:: DESTINATION lib/cmake/thalweg COMPONENT cpp)
# Headers name each other by their path in the project.
install(FILES client/core/collective_call.h client/core/session.h client/core/session_options.h
              client/core/session_stats.h
        DESTINATION include/thalweg/client/core COMPONENT cpp)
install(FILES core/device/device_runtime.h DESTINATION include/thalweg/core/device COMPONENT cpp)
install(DIRECTORY core/base DESTINATION include/thalweg/core COMPONENT cpp
        FILES_MATCHING PATTERN "*.h" PATTERN "*_test_util.h" EXCLUDE)

include(CMakePackageConfigHelpers)
configure_package_config_file(
  cmake/thalweg-config.cmake.in ${PROJECT_BINARY_DIR}/thalweg-config.cmake
  INSTALL_DESTINATION lib/cmake/thalweg NO_SET_AND_CHECK_MACRO)
# A minor version may change the programming interface as long as the major one is 0.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/thalweg-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/thalweg-config.cmake
              ${PROJECT_BINARY_DIR}/thalweg-config-version.cmake
        DESTINATION lib/cmake/thalweg COMPONENT cpp)
