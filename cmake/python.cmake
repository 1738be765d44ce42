# The Python package's extension: Python's limited API, so that one file serves every Python from 3.10 on. It links neither
# Python nor libstrobe: it opens the library that STROBE_LIBRARY names, or else the one beside it.
set(python_default OFF)  # as part of another project: it would be written into this source tree
if(PROJECT_IS_TOP_LEVEL)
  set(python_default AUTO)
endif()
set(STROBE_BUILD_PYTHON ${python_default} CACHE STRING
    "Build the Python package's extension: AUTO (when Python's headers are found), ON or OFF")
set_property(CACHE STROBE_BUILD_PYTHON PROPERTY STRINGS AUTO ON OFF)
if(NOT STROBE_BUILD_PYTHON)
  return()
endif()
set(required)
if(NOT STROBE_BUILD_PYTHON STREQUAL "AUTO")
  set(required REQUIRED)
endif()
find_package(Python 3.10 COMPONENTS Interpreter Development.Module ${required})
if(NOT Python_Development.Module_FOUND)
  message(STATUS "strobe: without its Python package, as there are no headers of Python 3.10 or newer (python3-dev)")
  return()
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
  OUTPUT_VARIABLE free_threaded OUTPUT_STRIP_TRAILING_WHITESPACE)
if(free_threaded STREQUAL "True")
  if(STROBE_BUILD_PYTHON STREQUAL "AUTO")
    message(STATUS "strobe: without its Python package, as ${Python_EXECUTABLE} is a free-threaded Python")
    return()
  endif()
  message(FATAL_ERROR "strobe: ${Python_EXECUTABLE} is a free-threaded Python, which has no limited API: "
                      "expected Python 3.10 or newer with a GIL, or -DSTROBE_BUILD_PYTHON=OFF")
endif()

add_library(strobe_python MODULE
  python/core/aten.cpp python/core/call.cpp python/core/direct.cpp python/core/latest.cpp python/core/library.cpp
  python/core/merge.cpp python/core/module.cpp python/core/options.cpp python/core/profiler.cpp python/core/tensor.cpp python/core/values.cpp
  python/core/xla.cpp)
target_include_directories(strobe_python PRIVATE include src)
target_include_directories(strobe_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
target_link_libraries(strobe_python PRIVATE strobe_flags ${CMAKE_DL_LIBS})
set_target_properties(strobe_python PROPERTIES PREFIX "" OUTPUT_NAME _core SUFFIX .abi3.so)
if(STROBE_SANITIZE)
  set_target_properties(strobe_python PROPERTIES EXCLUDE_FROM_ALL ON)  # for scripts/asan_python.sh alone, which names it
endif()
if(NOT SKBUILD AND NOT STROBE_SANITIZE)
  # Into the package of the source tree, where Python finds it: the file is the same for every preset.
  set_target_properties(strobe_python PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/python/strobe")
endif()
