# The CUDA back end: finds nvcc, as STROBE_CUDA says, and adds src/cuda to the library.

if(STROBE_CUDA STREQUAL OFF)
  set(STROBE_NO_CUDA_REASON "STROBE_CUDA=OFF was given")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(STROBE_CUDA STREQUAL ON)
    message(FATAL_ERROR "STROBE_CUDA=ON, but no CUDA compiler was found: put nvcc (12.4 or newer) on the PATH, "
                        "or set CMAKE_CUDA_COMPILER")
  endif()
  message(STATUS "no CUDA compiler found: building the CPU library alone (STROBE_CUDA=AUTO)")
  set(STROBE_NO_CUDA_REASON "no nvcc was found")
  return()
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # The CMake of Debian 12 does not know that nvcc 13 has C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED)
if(CUDAToolkit_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "nvcc ${CUDAToolkit_VERSION}, expected 12.4 or newer: set STROBE_CUDA=OFF to build without")
endif()
add_subdirectory(src/cuda)
