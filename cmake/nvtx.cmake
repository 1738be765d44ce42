# NVTX, by which launches show in the timelines of tools such as Nsight Systems: headers alone, of CUDA's toolkit (also where
# the kernels for CUDA are not built) or of a package of their own. They do nothing where no tool listens.

set(STROBE_NVTX AUTO CACHE STRING "Ranges of NVTX around launches: AUTO (when its headers are found), ON or OFF")
set_property(CACHE STROBE_NVTX PROPERTY STRINGS AUTO ON OFF)
if(STROBE_NVTX STREQUAL OFF)
  return()
endif()

find_program(STROBE_NVCC nvcc)
mark_as_advanced(STROBE_NVCC)
set(toolkit)
if(STROBE_NVCC)
  cmake_path(GET STROBE_NVCC PARENT_PATH toolkit)
endif()
find_path(STROBE_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} "${toolkit}/../include" ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
mark_as_advanced(STROBE_NVTX_INCLUDE_DIR)
if(NOT STROBE_NVTX_INCLUDE_DIR)
  if(STROBE_NVTX STREQUAL ON)
    message(FATAL_ERROR "STROBE_NVTX=ON, but nvtx3/nvToolsExt.h was not found: install CUDA's toolkit, "
                        "or set STROBE_NVTX_INCLUDE_DIR")
  endif()
  message(STATUS "no nvtx3/nvToolsExt.h found: launches have no ranges in Nsight Systems (STROBE_NVTX=AUTO)")
  return()
endif()
# For the one file that has ranges: the kernels are compiled as without.
set_source_files_properties(src/api/capi.cpp PROPERTIES COMPILE_DEFINITIONS STROBE_HAVE_NVTX=1)
if(NOT STROBE_NVTX_INCLUDE_DIR IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)  # named, it would come before C++'s own headers
  set_source_files_properties(src/api/capi.cpp PROPERTIES COMPILE_OPTIONS "-isystem;${STROBE_NVTX_INCLUDE_DIR}")
endif()
# NVTX opens the tool's library by dlopen, which older systems have in a library of its own.
list(APPEND STROBE_STATIC_LIBS ${CMAKE_DL_LIBS})
target_link_libraries(strobe PRIVATE ${CMAKE_DL_LIBS})
target_link_libraries(strobe_static PRIVATE ${CMAKE_DL_LIBS})
