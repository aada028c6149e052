# Rooms: one target per folder, each on a layer. A room may depend only on rooms of a lower layer,
# and only named rooms may link the heavy third-party libraries. Both are errors at configure time,
# so the architecture in docs/architecture.md is enforced rather than drawn.

set(THALWEG_RESERVED_grpc "transport;proto")    # gRPC; and protobuf, which policy has from proto
set(THALWEG_RESERVED_prometheus "http")         # prometheus-cpp
set(THALWEG_RESERVED_httplib "http")            # HTTP
set(THALWEG_RESERVED_openssl "identity;net;http")  # keys, certificates, HTTPS; gRPC has its own way
set(THALWEG_RESERVED_torch "torch")             # libtorch
set(THALWEG_RESERVED_jemalloc "programs")       # a process has one allocator: workers have Python's
set(THALWEG_RESERVED_cuda "cuda_kernels;device")  # the CUDA run-time library

include("${CMAKE_CURRENT_LIST_DIR}/Includes.cmake")

# thalweg_room(NAME name LAYER n [FOLDERS …] [SOURCES …] [DEPS rooms…] [EXTERNAL targets…]
#              [RESERVED kinds…])
# Makes the static library thalweg_<name> (alias thalweg::<name>); INTERFACE when it has no sources.
# The room owns FOLDERS, which are relative to the project, or else the folder of the caller.
function(thalweg_room)
  cmake_parse_arguments(ARG "" "NAME;LAYER" "FOLDERS;SOURCES;DEPS;EXTERNAL;RESERVED" ${ARGN})
  set(target thalweg_${ARG_NAME})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(thalweg::${ARG_NAME} ALIAS ${target})
  target_include_directories(${target} ${scope} $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                                $<INSTALL_INTERFACE:include/thalweg>)
  foreach(dep IN LISTS ARG_DEPS)
    target_link_libraries(${target} ${scope} thalweg_${dep})
  endforeach()
  target_link_libraries(${target} ${scope} ${ARG_EXTERNAL})
  thalweg_declare_room(NAME ${ARG_NAME} LAYER ${ARG_LAYER} FOLDERS ${ARG_FOLDERS}
                       DEPS ${ARG_DEPS} RESERVED ${ARG_RESERVED})
endfunction()

# The part of thalweg_room() that makes no target: records the room for thalweg_check_rooms(). Rooms
# that are not static libraries (the torch module, programs) call it themselves.
function(thalweg_declare_room)
  cmake_parse_arguments(ARG "" "NAME;LAYER" "FOLDERS;DEPS;RESERVED" ${ARGN})
  set_property(GLOBAL APPEND PROPERTY THALWEG_ROOMS ${ARG_NAME})
  set_property(GLOBAL PROPERTY THALWEG_LAYER_${ARG_NAME} ${ARG_LAYER})
  set_property(GLOBAL PROPERTY THALWEG_DEPS_${ARG_NAME} "${ARG_DEPS}")
  foreach(kind IN LISTS ARG_RESERVED)
    if(NOT ARG_NAME IN_LIST THALWEG_RESERVED_${kind})
      message(FATAL_ERROR "room '${ARG_NAME}' must not link ${kind}: only "
                          "'${THALWEG_RESERVED_${kind}}' may")
    endif()
  endforeach()
  if(NOT ARG_FOLDERS)
    file(RELATIVE_PATH ARG_FOLDERS "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  endif()
  foreach(folder IN LISTS ARG_FOLDERS)
    thalweg_claim_folder("${folder}" ${ARG_NAME})
  endforeach()
endfunction()

# Fails the configuration when a room depends on a room of its own or a higher layer, or when a file
# includes one that its room may not know (Includes.cmake).
function(thalweg_check_rooms)
  get_property(rooms GLOBAL PROPERTY THALWEG_ROOMS)
  foreach(room IN LISTS rooms)
    get_property(layer GLOBAL PROPERTY THALWEG_LAYER_${room})
    get_property(deps GLOBAL PROPERTY THALWEG_DEPS_${room})
    foreach(dep IN LISTS deps)
      get_property(dep_layer GLOBAL PROPERTY THALWEG_LAYER_${dep})
      if(NOT dep IN_LIST rooms)
        message(FATAL_ERROR "room '${room}' depends on '${dep}', which is not a room")
      elseif(NOT dep_layer LESS layer)
        message(FATAL_ERROR "room '${room}' (layer ${layer}) must not depend on '${dep}' "
                            "(layer ${dep_layer}): dependencies point down")
      endif()
    endforeach()
  endforeach()
  thalweg_check_includes()
endfunction()

# Makes scripts/gpu_bundle take the program, whose name begins with gpu_, to a GPU machine.
function(thalweg_gpu_program name)
  if(NOT TARGET gpu_programs)
    add_custom_target(gpu_programs)
  endif()
  add_dependencies(gpu_programs ${name})
endfunction()

# thalweg_floors(folder floors…): the order of a room's subfolders. Each may include files of those
# before it, `folder` itself, and none after it; folders that share a floor, "a|b", must not know
# each other. What is in `folder` itself is "." among them; tests that lie there, and `testing`, may
# include all.
# Fails the configuration when a file includes upwards, or lies in a folder that is on no floor.
function(thalweg_floors folder)
  set(errors "")
  set(below "testing")
  file(GLOB found RELATIVE "${PROJECT_SOURCE_DIR}/${folder}" "${PROJECT_SOURCE_DIR}/${folder}/*/*.h"
       "${PROJECT_SOURCE_DIR}/${folder}/*/*.cc" "${PROJECT_SOURCE_DIR}/${folder}/*/*.cu")
  list(TRANSFORM found REPLACE "/.*" "")
  string(REPLACE "|" ";" named "${ARGN}")
  list(REMOVE_ITEM found ${named} testing)
  if(found)
    list(REMOVE_DUPLICATES found)
    message(FATAL_ERROR "${folder} has folders that are on no floor: ${found}")
  endif()
  foreach(floor IN LISTS ARGN)
    string(REPLACE "|" ";" parts "${floor}")
    foreach(part IN LISTS parts)
      set(others ${named})
      list(REMOVE_ITEM others ${part} ${below})
      thalweg_includes_of("${folder}" ${part} "${others}" across)
      list(APPEND errors ${across})
    endforeach()
    list(APPEND below ${parts})
  endforeach()
  if(errors)
    list(JOIN errors "\n  " errors)
    message(FATAL_ERROR "Includes against the floors of ${folder}, ${ARGN}:\n  ${errors}")
  endif()
endfunction()

# Part of thalweg_floors(): sets `out` to the includes that `part` of `folder` must not have, those of
# files in the folders `others`.
function(thalweg_includes_of folder part others out)
  set(across "")
  list(TRANSFORM others APPEND "/")
  list(TRANSFORM others REPLACE "^[.]/$" "[^/]+[.]h")
  list(JOIN others "|" others)
  file(GLOB sources "${PROJECT_SOURCE_DIR}/${folder}/${part}/*.h"
       "${PROJECT_SOURCE_DIR}/${folder}/${part}/*.cc" "${PROJECT_SOURCE_DIR}/${folder}/${part}/*.cu")
  if(part STREQUAL ".")
    list(FILTER sources EXCLUDE REGEX "_(test|bench|fuzz)[.]cc$")
  endif()
  if(NOT others)
    set(sources "")
  endif()
  foreach(source IN LISTS sources)
    file(STRINGS "${source}" lines REGEX "^#include \"${folder}/(${others})")
    file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
    list(TRANSFORM lines PREPEND "${name}: ")
    list(APPEND across ${lines})
  endforeach()
  set(${out} "${across}" PARENT_SCOPE)
endfunction()

# thalweg_test_library(NAME x ROOM room SOURCES … [LINK …]): what tests of several rooms share, the
# target thalweg_x. LINK names libraries beside the room.
function(thalweg_test_library)
  if(NOT THALWEG_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM" "SOURCES;LINK" ${ARGN})
  add_library(thalweg_${ARG_NAME} STATIC ${ARG_SOURCES})
  target_link_libraries(thalweg_${ARG_NAME} PUBLIC thalweg_${ARG_ROOM} ${ARG_LINK})
  thalweg_declare_test(${ARG_NAME} "${ARG_ROOM};${ARG_LINK}" "${ARG_SOURCES}")
endfunction()

# thalweg_test(NAME x_test ROOM room SOURCES … [LINK …] [LABELS …] [TIMEOUT s])
# With the label gpu it is a program for thalweg_gpu_program.
function(thalweg_test)
  if(NOT THALWEG_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM;TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(THALWEG_SANITIZE)
    math(EXPR ARG_TIMEOUT "2 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  # Tests take most of a build, and optimising them takes more than a third of that.
  target_compile_options(${ARG_NAME} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK} GTest::gmock
                                            GTest::gtest GTest::gtest_main)
  thalweg_precompile_headers(${ARG_NAME})
  thalweg_declare_test(${ARG_NAME} "${ARG_ROOM};${ARG_LINK}" "${ARG_SOURCES}")
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME})
  if("gpu" IN_LIST ARG_LABELS)
    thalweg_gpu_program(${ARG_NAME})
  endif()
  # CTest's timeout is the watchdog of every unit test: a hang is a failure.
  set_tests_properties(${ARG_NAME} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
                                              LABELS "unit;${ARG_ROOM};${ARG_LABELS}")
  if(THALWEG_SANITIZE MATCHES "thread")
    set_tests_properties(
      ${ARG_NAME} PROPERTIES ENVIRONMENT
                             "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp:ignore_noninstrumented_modules=$<BOOL:${THALWEG_SERVER}>")
  endif()
endfunction()

# Part of thalweg_test(): spares the test the parsing of headers that every test includes, which
# takes a third of its compilation. The first test of a build makes what all others use.
function(thalweg_precompile_headers test)
  get_property(first GLOBAL PROPERTY THALWEG_PRECOMPILED)
  if(first)
    target_precompile_headers(${test} REUSE_FROM ${first})
    return()
  endif()
  set_property(GLOBAL PROPERTY THALWEG_PRECOMPILED ${test})
  target_precompile_headers(
    ${test} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<gmock/gmock.h$<ANGLE-R>>"
                    "$<$<COMPILE_LANGUAGE:CXX>:<gtest/gtest.h$<ANGLE-R>>"
                    "$<$<COMPILE_LANGUAGE:CXX>:absl/status/statusor.h>")
endfunction()

# thalweg_fuzz(NAME x_fuzz ROOM room SOURCES … [LINK …]): a fuzz target, and a test that runs it on
# its corpus, the files of tests/fuzz/x_fuzz. With Clang's -fsanitize=fuzzer the program makes
# inputs of its own instead (scripts/fuzz), and otherwise at random if asked (scripts/fuzz_quickly).
function(thalweg_fuzz)
  if(NOT THALWEG_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM" "SOURCES;LINK" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK})
  thalweg_declare_test(${ARG_NAME} "${ARG_ROOM};${ARG_LINK}" "${ARG_SOURCES}")
  if(THALWEG_SANITIZE MATCHES "fuzzer")
    target_link_options(${ARG_NAME} PRIVATE -fsanitize=fuzzer)
    if(NOT TARGET fuzz_targets)
      add_custom_target(fuzz_targets)
    endif()
    add_dependencies(fuzz_targets ${ARG_NAME})
    return()
  endif()
  target_sources(${ARG_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/core/base/fuzz_main.cc)
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME} ${PROJECT_SOURCE_DIR}/tests/fuzz/${ARG_NAME})
  set_tests_properties(${ARG_NAME} PROPERTIES TIMEOUT 120 LABELS "unit;fuzz;${ARG_ROOM}")
endfunction()

# thalweg_bench(NAME x_bench ROOM room SOURCES … [LINK …]) makes a Google Benchmark program; none
# where a sanitizer would make its figures meaningless.
function(thalweg_bench)
  if(NOT THALWEG_TESTS OR THALWEG_SANITIZE)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM" "SOURCES;LINK" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK} benchmark::benchmark
                                            benchmark::benchmark_main)
  thalweg_declare_test(${ARG_NAME} "${ARG_ROOM};${ARG_LINK}" "${ARG_SOURCES}")
endfunction()

# thalweg_gpu_bench(NAME gpu_x ROOM room SOURCES … [LINK …]): a program that measures on a GPU, or
# that such a program starts; one for thalweg_gpu_program.
function(thalweg_gpu_bench)
  if(NOT THALWEG_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM" "SOURCES;LINK" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK})
  thalweg_declare_test(${ARG_NAME} "${ARG_ROOM};${ARG_LINK}" "${ARG_SOURCES}")
  thalweg_gpu_program(${ARG_NAME})
endfunction()
