# This file sets what every target uses: compiler flags, ccache, the fast linker and the sanitizers.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(THALWEG_CCACHE ccache)
if(THALWEG_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${THALWEG_CCACHE})
  # What a source includes is known from its last compilation, without another run of the
  # preprocessor. Precompiled headers may define macros that a source does not use, and the time.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros
      ${THALWEG_CCACHE})
endif()

find_program(THALWEG_MOLD mold)
if(THALWEG_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# Promise 2 (same bits everywhere): the compiler must not fuse a*b+c where the source does not.
set(thalweg_flags -Wall -Wextra -Wno-unused-parameter -fvisibility=hidden -ffp-contract=off)
list(JOIN thalweg_flags "," thalweg_host_flags)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${thalweg_flags}>"
                    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${thalweg_host_flags}>")

if(THALWEG_SANITIZE)
  add_compile_options(-fsanitize=${THALWEG_SANITIZE} -fno-omit-frame-pointer)
  if(THALWEG_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
  add_link_options(-fsanitize=${THALWEG_SANITIZE})
endif()
