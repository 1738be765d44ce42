# Toolchain file of `make wheel`: this machine's GCC, and the C, C++ and OpenMP run times of the sysroot that
# scripts/sysroot.sh makes. What is linked against those runs on Linux systems that are older than this machine.
# Code of .cu files is compiled with this machine's headers and linked like the rest.

set(STROBE_MANYLINUX ON)
set(STROBE_SYSROOT "${CMAKE_CURRENT_LIST_DIR}/../build/sysroot" CACHE PATH "What scripts/sysroot.sh made")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES STROBE_SYSROOT)
cmake_path(ABSOLUTE_PATH STROBE_SYSROOT NORMALIZE)
set(sysroot_libraries "${STROBE_SYSROOT}/usr/lib/x86_64-linux-gnu")
if(NOT EXISTS "${sysroot_libraries}/libgomp.so.1")
  message(FATAL_ERROR "no sysroot in ${STROBE_SYSROOT}: run scripts/sysroot.sh, or `make wheel`, which does")
endif()

# The folder by name too: GCC's own, which has links to this machine's libgomp and libstdc++, would come first.
set(CMAKE_CXX_FLAGS_INIT "--sysroot=${STROBE_SYSROOT} -L${sysroot_libraries}")
set(OpenMP_gomp_LIBRARY "${sysroot_libraries}/libgomp.so" CACHE FILEPATH "")
set(OpenMP_pthread_LIBRARY "${sysroot_libraries}/libpthread.so" CACHE FILEPATH "")
