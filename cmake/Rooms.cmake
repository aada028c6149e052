# Rooms: one target per folder, each on a layer. A room may depend only on rooms of a lower layer,
# and only named rooms may link the heavy third-party libraries. Both are errors at configure time,
# so the architecture in docs/architecture.md is enforced rather than drawn.

set(THALWEG_RESERVED_grpc "transport;proto")    # gRPC and protobuf
set(THALWEG_RESERVED_prometheus "http")         # prometheus-cpp
set(THALWEG_RESERVED_httplib "http")            # HTTP
set(THALWEG_RESERVED_openssl "net;http")        # certificates, HTTPS; gRPC has its own way to it
set(THALWEG_RESERVED_torch "torch")             # libtorch
set(THALWEG_RESERVED_cuda "cuda_kernels;device")  # the CUDA run-time library

define_property(GLOBAL PROPERTY THALWEG_ROOMS)

# thalweg_room(NAME name LAYER n [SOURCES …] [DEPS rooms…] [EXTERNAL targets…]
#              [RESERVED kinds…])
# Makes the static library thalweg_<name> (alias thalweg::<name>); INTERFACE when it has no sources.
function(thalweg_room)
  cmake_parse_arguments(ARG "" "NAME;LAYER" "SOURCES;DEPS;EXTERNAL;RESERVED" ${ARGN})
  set(target thalweg_${ARG_NAME})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(thalweg::${ARG_NAME} ALIAS ${target})
  target_include_directories(${target} ${scope} ${PROJECT_SOURCE_DIR})
  foreach(dep IN LISTS ARG_DEPS)
    target_link_libraries(${target} ${scope} thalweg_${dep})
  endforeach()
  target_link_libraries(${target} ${scope} ${ARG_EXTERNAL})
  thalweg_declare_room(${ARG_NAME} ${ARG_LAYER} "${ARG_DEPS}" "${ARG_RESERVED}")
endfunction()

# Records a room for the check; for rooms that are not static libraries (torch module, programs).
function(thalweg_declare_room name layer deps reserved)
  set_property(GLOBAL APPEND PROPERTY THALWEG_ROOMS ${name})
  set_property(GLOBAL PROPERTY THALWEG_LAYER_${name} ${layer})
  set_property(GLOBAL PROPERTY THALWEG_DEPS_${name} "${deps}")
  foreach(kind IN LISTS reserved)
    if(NOT name IN_LIST THALWEG_RESERVED_${kind})
      message(FATAL_ERROR "room '${name}' must not link ${kind}: only "
                          "'${THALWEG_RESERVED_${kind}}' may")
    endif()
  endforeach()
endfunction()

# Fails the configuration when a room depends on a room of its own or a higher layer, or when a
# header of a higher layer is included by a lower one.
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
endfunction()

# Has scripts/gpu_bundle take the program, whose name begins with gpu_, to a GPU machine.
function(thalweg_gpu_program name)
  if(NOT TARGET gpu_programs)
    add_custom_target(gpu_programs)
  endif()
  add_dependencies(gpu_programs ${name})
endfunction()

# thalweg_walls(folder parts…): subfolders of a room that share what lies in `folder` and must not
# know each other. Fails the configuration when a source of one includes a header of another.
function(thalweg_walls folder)
  foreach(part IN LISTS ARGN)
    set(others ${ARGN})
    list(REMOVE_ITEM others ${part})
    list(JOIN others "|" others)
    file(GLOB sources "${PROJECT_SOURCE_DIR}/${folder}/${part}/*")
    if(NOT sources)
      message(FATAL_ERROR "walls of ${folder}: '${part}' has no sources: is that its name?")
    endif()
    foreach(source IN LISTS sources)
      file(STRINGS "${source}" across REGEX "^#include \"${folder}/(${others})/")
      if(across)
        message(FATAL_ERROR "${source} has ${across}: the parts of ${folder} must not know each "
                            "other; move what both need to ${folder}")
      endif()
    endforeach()
  endforeach()
endfunction()

# thalweg_test(NAME x_test ROOM room SOURCES … [LINK …] [LABELS …] [TIMEOUT s])
# With the label gpu it is a program for thalweg_gpu_program.
function(thalweg_test)
  if(NOT THALWEG_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM;TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  # Tests take most of a build, and more than a third of that is optimising them.
  target_compile_options(${ARG_NAME} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK} GTest::gmock
                                            GTest::gtest GTest::gtest_main)
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
                             "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp")
  endif()
endfunction()

# thalweg_bench(NAME x_bench ROOM room SOURCES … [LINK …]): a Google Benchmark program. None where a
# sanitizer would make its figures meaningless.
function(thalweg_bench)
  if(NOT THALWEG_TESTS OR THALWEG_SANITIZE)
    return()
  endif()
  cmake_parse_arguments(ARG "" "NAME;ROOM" "SOURCES;LINK" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE thalweg_${ARG_ROOM} ${ARG_LINK} benchmark::benchmark
                                            benchmark::benchmark_main)
endfunction()
