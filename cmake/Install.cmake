# This file installs what the Python package contains besides Python: the extension, the two
# programs, and the shared libraries they need that an ordinary machine does not have. It is
# included when all three targets exist.

# DT_RPATH is used instead of DT_RUNPATH: only the former also finds what the bundled libraries
# need.
get_property(extensions GLOBAL PROPERTY THALWEG_EXTENSIONS)
foreach(target ${extensions} thalweg_sidecar_bin thalweg_aggregator_bin)
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endforeach()
set_target_properties(thalweg_sidecar_bin thalweg_aggregator_bin
                      PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")

foreach(target IN LISTS extensions)
  get_target_property(folder ${target} THALWEG_INSTALL_FOLDER)
  install(TARGETS ${target} LIBRARY DESTINATION ${folder} COMPONENT thalweg)
endforeach()
install(FILES client/python/thalweg_apex.pth DESTINATION . COMPONENT thalweg)
install(TARGETS thalweg_sidecar_bin thalweg_aggregator_bin
        RUNTIME DESTINATION thalweg/bin COMPONENT thalweg)

# The component `libraries` is for systems like the one that built it; scripts/release does without it,
# and bundles libraries under names of their own.
#
# Everything is bundled except the C and C++ run-time libraries and torch, which `import torch` has
# loaded before the extension. Each library is one file named by its soname: wheels cannot hold
# links.
install(CODE [[
  file(GET_RUNTIME_DEPENDENCIES
       EXECUTABLES $<TARGET_FILE:thalweg_sidecar_bin> $<TARGET_FILE:thalweg_aggregator_bin>
       MODULES $<TARGET_FILE:thalweg_torch>
       RESOLVED_DEPENDENCIES_VAR libraries
       PRE_EXCLUDE_REGEXES "^libtorch" "^libc10" "^libpython" "^ld-linux" "^libc\\.so" "^libm\\.so"
                           "^libdl\\.so" "^librt\\.so" "^libpthread\\.so" "^libresolv\\.so"
                           "^libstdc\\+\\+\\.so" "^libgcc_s\\.so")
  set(folder "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/thalweg/lib")
  file(MAKE_DIRECTORY "${folder}")
  foreach(library IN LISTS libraries)
    cmake_path(GET library FILENAME soname)
    file(REAL_PATH "${library}" source)
    file(COPY_FILE "${source}" "${folder}/${soname}" ONLY_IF_DIFFERENT)
  endforeach()
  list(LENGTH libraries count)
  message(STATUS "Bundled ${count} shared libraries in ${folder}")
]] COMPONENT libraries)
