# Which file may include which, checked at configure time and without a compiler:
#
# - Every folder with C++ belongs to one room: to the one that claims it, or else to its parent's.
# - A header or source includes files of its own room and of those that the room depends on, directly
#   or through others. These are on lower layers, so no include runs upward.
# - A source of a test, a benchmark or a library for tests includes files beside it in its room's
#   folders, and files of the rooms that the target links (ROOM, LINK). Headers obey their room's
#   rule also where only tests include them.
# - Files are named by their path in the project.
#
# A test or benchmark that a configuration does not build is not checked in it, nor are the folders
# that it leaves out.

# Gives `folder`, relative to the project, to `room`.
function(thalweg_claim_folder folder room)
  get_property(owner GLOBAL PROPERTY THALWEG_ROOM_OF_${folder})
  if(owner)
    message(FATAL_ERROR "folder ${folder} belongs to room '${owner}' and cannot belong to "
                        "'${room}' as well")
  endif()
  set_property(GLOBAL PROPERTY THALWEG_ROOM_OF_${folder} ${room})
  string(REGEX MATCH "^[^/]+" root "${folder}")
  set_property(GLOBAL APPEND PROPERTY THALWEG_SOURCE_ROOTS ${root})
endfunction()

# thalweg_leave_out(folders…): this configuration has no rooms for these folders.
function(thalweg_leave_out)
  foreach(folder IN LISTS ARGN)
    thalweg_claim_folder("${folder}" "(left out)")
  endforeach()
endfunction()

# Records that the target `name`, made for tests, compiles `sources`, which are relative to the
# caller's folder, and links `links`, of which only rooms and other such targets matter.
function(thalweg_declare_test name links sources)
  set_property(GLOBAL APPEND PROPERTY THALWEG_TEST_TARGETS ${name})
  list(FILTER links INCLUDE REGEX ".")
  list(TRANSFORM links REPLACE "^thalweg(::|_)" "")
  set_property(GLOBAL PROPERTY THALWEG_DEPS_${name} "${links}")
  foreach(source IN LISTS sources)
    get_filename_component(path "${source}" ABSOLUTE)
    file(RELATIVE_PATH path "${PROJECT_SOURCE_DIR}" "${path}")
    set_property(GLOBAL APPEND PROPERTY THALWEG_TESTS_OF_${path} ${name})
  endforeach()
endfunction()

# Sets `out` to the room that `folder` belongs to, or to "".
function(thalweg_room_of folder out)
  set(room "")
  while(folder AND NOT room)
    get_property(room GLOBAL PROPERTY THALWEG_ROOM_OF_${folder})
    get_filename_component(folder "${folder}" DIRECTORY)
  endwhile()
  set(${out} "${room}" PARENT_SCOPE)
endfunction()

# Sets `out` to the rooms whose files `name`, a room or a target for tests, may include.
function(thalweg_known_rooms name out)
  get_property(known GLOBAL PROPERTY THALWEG_KNOWN_${name})
  if(NOT known)
    set(known ${name})
    get_property(deps GLOBAL PROPERTY THALWEG_DEPS_${name})
    foreach(dep IN LISTS deps)
      thalweg_known_rooms(${dep} more)
      list(APPEND known ${more})
    endforeach()
    list(REMOVE_DUPLICATES known)
    set_property(GLOBAL PROPERTY THALWEG_KNOWN_${name} "${known}")
  endif()
  set(${out} "${known}" PARENT_SCOPE)
endfunction()

# Sets `out` to the number of the line of `file` that includes `header`.
function(thalweg_line_of_include file header out)
  file(READ "${PROJECT_SOURCE_DIR}/${file}" text)
  string(REGEX MATCH "^(.*\n)?[ \t]*#[ \t]*include[ \t]*[<\"]${header}[>\"]" before "${text}")
  string(REGEX REPLACE "[^\n]" "" before "${before}")
  string(LENGTH "${before}" line)
  math(EXPR line "${line} + 1")
  set(${out} ${line} PARENT_SCOPE)
endfunction()

# Sets `out` to why `includer`, a room or a target for tests, must not include a file of `room`.
function(thalweg_why_not includer room out)
  get_property(layer GLOBAL PROPERTY THALWEG_LAYER_${includer})
  get_property(above GLOBAL PROPERTY THALWEG_LAYER_${room})
  set(why "which room '${includer}' does not depend on")
  if("${layer}" STREQUAL "")
    set(why "which test '${includer}' does not link")
  elseif(NOT above LESS layer)
    set(why "(layer ${above}), which room '${includer}' (layer ${layer}) must not know: includes "
            "point down")
    string(CONCAT why ${why})
  endif()
  set(${out} "room '${room}' ${why}" PARENT_SCOPE)
endfunction()

# Part of thalweg_check_includes(): appends to `errors` what is wrong with `lines`, the includes of
# `file` of the room `owner` in the folder `here`, when `includer`, a room or a target for tests,
# compiles it.
macro(thalweg_check_file file includer)
  thalweg_known_rooms(${includer} known)
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^[^<\"]*[<\"]([^>\"]*).*" "\\1" header "${line}")
    get_filename_component(folder "${header}" DIRECTORY)
    if(NOT DEFINED "room_of_${folder}")
      thalweg_room_of("${folder}" "room_of_${folder}")
    endif()
    set(room "${room_of_${folder}}")
    set(wrong "")
    if(room STREQUAL "")
      string(REGEX MATCH "^[^/]+" root "${header}")
      if(root IN_LIST roots)
        set(wrong "which lies in no room")
      elseif(EXISTS "${PROJECT_SOURCE_DIR}/${here}/${header}")
        set(wrong "which must be named by its path in the project")
      endif()
    elseif(NOT room IN_LIST known AND NOT room STREQUAL owner)
      if(room STREQUAL "(left out)")
        set(wrong "which lies in no room of this configuration")
      else()
        thalweg_why_not(${includer} ${room} wrong)
        string(PREPEND wrong "of ")
      endif()
    endif()
    if(wrong)
      thalweg_line_of_include("${file}" "${header}" number)
      list(APPEND errors "${file}:${number} includes ${header} ${wrong}")
    endif()
  endforeach()
endmacro()

# Fails the configuration when a file of the project includes another against the rules above, or
# lies in no room.
function(thalweg_check_includes)
  get_property(roots GLOBAL PROPERTY THALWEG_SOURCE_ROOTS)
  list(REMOVE_DUPLICATES roots)
  set(globs ${roots})
  list(TRANSFORM globs REPLACE "(.+)"
       "${PROJECT_SOURCE_DIR}/\\1/*.h;${PROJECT_SOURCE_DIR}/\\1/*.cc;${PROJECT_SOURCE_DIR}/\\1/*.cu")
  file(GLOB_RECURSE files RELATIVE "${PROJECT_SOURCE_DIR}" ${globs})
  set(errors "")
  foreach(file IN LISTS files)
    get_filename_component(here "${file}" DIRECTORY)
    if(NOT DEFINED "room_of_${here}")
      thalweg_room_of("${here}" "room_of_${here}")
    endif()
    set(owner "${room_of_${here}}")
    get_property(tests GLOBAL PROPERTY "THALWEG_TESTS_OF_${file}")
    if(owner STREQUAL "")
      list(APPEND errors "${file} lies in no room: a thalweg_room() must claim its folder")
    elseif(NOT owner STREQUAL "(left out)" AND (tests OR NOT file MATCHES "_(test|bench|fuzz)\\.cc$"))
      file(STRINGS "${PROJECT_SOURCE_DIR}/${file}" lines
           REGEX "^[ \t]*#[ \t]*include[ \t]*(\"[^\"]*\"|<[^>]*/[^>]*>)")
      if(NOT tests)
        set(tests ${owner})
      endif()
      foreach(includer IN LISTS tests)
        thalweg_check_file("${file}" ${includer})
      endforeach()
    endif()
  endforeach()
  if(errors)
    list(REMOVE_DUPLICATES errors)
    list(JOIN errors "\n  " errors)
    message(FATAL_ERROR "Includes against the rules of cmake/Includes.cmake:\n  ${errors}")
  endif()
endfunction()
