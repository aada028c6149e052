# Decides whether the CUDA kernels are built, and with which compiler. Sets THALWEG_CUDA to ON or
# OFF; with ON it enables the language CUDA and makes the target CUDA::cudart_static.
#
# nvcc is the one that CUDACXX or CMAKE_CUDA_COMPILER names, or the one in PATH, or the one in the
# nvidia-* wheels of the Python that CMake uses. Wheels lack a few names that an installed toolkit
# has; a folder of links in the build tree adds them.

set(THALWEG_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO (where nvcc is found)")
set_property(CACHE THALWEG_CUDA PROPERTY STRINGS AUTO ON OFF)
set(THALWEG_CUDA_WHEELS "nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-cccl and "
                        "nvidia-cuda-runtime, all of version 13.0")

# Sets `out` to the folder of the CUDA wheels in the site-packages of Python_EXECUTABLE, or to "".
function(thalweg_find_cuda_wheels out)
  set(${out} "" PARENT_SCOPE)
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter QUIET)
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(wheels "${site_packages}/nvidia/cu13")
  foreach(part IN ITEMS bin/nvcc nvvm/bin/cicc include/crt/host_config.h include/cccl
                        include/cuda_runtime.h lib/libcudart_static.a)
    if(NOT EXISTS "${wheels}/${part}")
      return()
    endif()
  endforeach()
  set(${out} "${wheels}" PARENT_SCOPE)
endfunction()

# Makes `folder` a toolkit of links to the files of `wheels`.
function(thalweg_link_cuda_toolkit wheels folder)
  # nvcc looks beside bin/, so that is a folder of links and not a link to a folder. Only CUDA's own
  # libraries are linked: the same folders have gigabytes that are not part of a toolkit.
  file(MAKE_DIRECTORY "${folder}/bin" "${folder}/lib64")
  foreach(part IN ITEMS include nvvm)
    file(CREATE_LINK "${wheels}/${part}" "${folder}/${part}" SYMBOLIC)
  endforeach()
  file(GLOB programs RELATIVE "${wheels}/bin" "${wheels}/bin/*")
  foreach(program IN LISTS programs)
    file(CREATE_LINK "${wheels}/bin/${program}" "${folder}/bin/${program}" SYMBOLIC)
  endforeach()
  file(GLOB libraries RELATIVE "${wheels}/lib" "${wheels}/lib/libcuda*")
  foreach(library IN LISTS libraries)
    file(CREATE_LINK "${wheels}/lib/${library}" "${folder}/lib64/${library}" SYMBOLIC)
  endforeach()
  file(CREATE_LINK libcudart.so.13 "${folder}/lib64/libcudart.so" SYMBOLIC)
endfunction()

# Sets CMAKE_CUDA_COMPILER when it is not set and an nvcc is found.
macro(thalweg_find_nvcc)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(THALWEG_NVCC nvcc)
    if(THALWEG_NVCC)
      set(CMAKE_CUDA_COMPILER "${THALWEG_NVCC}")
    else()
      thalweg_find_cuda_wheels(thalweg_cuda_wheels)
      if(thalweg_cuda_wheels)
        set(CUDAToolkit_ROOT "${PROJECT_BINARY_DIR}/cuda-toolkit")
        thalweg_link_cuda_toolkit("${thalweg_cuda_wheels}" "${CUDAToolkit_ROOT}")
        set(CMAKE_CUDA_COMPILER "${CUDAToolkit_ROOT}/bin/nvcc")
      endif()
    endif()
  endif()
endmacro()

if(THALWEG_CUDA STREQUAL "AUTO" AND THALWEG_SANITIZE)
  set(THALWEG_CUDA OFF)
  message(STATUS "CUDA kernels: not built with -fsanitize=${THALWEG_SANITIZE}")
elseif(THALWEG_CUDA STREQUAL "AUTO" OR THALWEG_CUDA)
  thalweg_find_nvcc()
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    set(THALWEG_CUDA ON)
  elseif(THALWEG_CUDA STREQUAL "AUTO")
    set(THALWEG_CUDA OFF)
    message(STATUS "CUDA kernels: not built, no nvcc was found")
  else()
    string(CONCAT wheels ${THALWEG_CUDA_WHEELS})
    message(FATAL_ERROR "THALWEG_CUDA=ON needs nvcc, and none was found: set CUDACXX, have it in PATH, "
                        "or install into ${Python_EXECUTABLE} the packages ${wheels}")
  endif()
endif()
if(NOT THALWEG_CUDA)
  return()
endif()

# The build has machine code for current GPUs (A100, H100, H200) and PTX for newer ones.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
endif()
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# The static run-time lets programs run where only a driver is installed.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(THALWEG_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${THALWEG_CCACHE}")
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.0 REQUIRED)
# Promise 2 (same bits everywhere), as in Compiler.cmake: nvcc must not fuse a*b+c where the source
# does not. Its defaults keep subnormals and round division and square root to nearest.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>")
# Kernels whose values do not fit into registers would move more bytes than they are written to
# move.
add_compile_options("$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Release>>:-Xptxas=--warn-on-spills,-Werror>")
message(STATUS "CUDA kernels: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
               "architectures ${CMAKE_CUDA_ARCHITECTURES}")
