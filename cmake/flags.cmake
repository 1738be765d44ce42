# Compiler flags of every target of this project: link strobe_flags privately.

add_library(strobe_flags INTERFACE)
target_compile_options(strobe_flags INTERFACE
  -Wall -Wextra -Wshadow
  # Never -ffast-math, whatever CMAKE_CXX_FLAGS or a project that has this one in it says: NaN and infinity must come through.
  -fno-fast-math
  # errno from the maths functions would forbid vectorising them. Behind the former, which would have them set it.
  -fno-math-errno)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(strobe_flags INTERFACE -Wno-restrict)  # false alarms in std::string: GCC bug 105651
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)
  target_compile_options(strobe_flags INTERFACE -Wno-unknown-warning-option)  # pragmas that are meant for GCC
endif()
if(STROBE_WERROR)
  target_compile_options(strobe_flags INTERFACE -Werror)
endif()

if(STROBE_SANITIZE)
  # For all targets, GoogleTest's headers included: a report that does not end the program would go unseen.
  add_compile_options(-fsanitize=${STROBE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${STROBE_SANITIZE})
endif()

# strobe_sources(OUT FILE...): those of FILE that are there. A new file is picked up by the next configure.
function(strobe_sources out)
  set(found)
  foreach(file IN LISTS ARGN)
    if(EXISTS "${PROJECT_SOURCE_DIR}/${file}")
      list(APPEND found "${PROJECT_SOURCE_DIR}/${file}")
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()
