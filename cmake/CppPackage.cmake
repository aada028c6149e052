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
# session.h and what it includes; headers name each other by their path in the project.
# scripts/cpp_reference.py makes the reference of these.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/public_headers.txt)
file(STRINGS cmake/public_headers.txt headers)
foreach(header IN LISTS headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${header} DESTINATION include/thalweg/${folder} COMPONENT cpp)
endforeach()

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
