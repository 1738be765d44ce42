# libstrobe: strobe (shared) and strobe_static from one set of objects.

find_package(OpenMP REQUIRED COMPONENTS CXX)
# Headers only: Debian ships Highway's library part as a shared object, and libstrobe should need none.
find_path(STROBE_HIGHWAY_INCLUDE_DIR hwy/highway.h)
if(NOT STROBE_HIGHWAY_INCLUDE_DIR)
  message(FATAL_ERROR "hwy/highway.h not found: install Google Highway (Debian: apt install libhwy-dev), "
                      "or run scripts/setup.sh")
endif()

strobe_sources(sources
  src/api/capi.cpp
  src/api/kernel_table.cpp
  src/api/log.cpp
  src/core/machine.cpp
  src/api/plan.cpp
  src/api/record.cpp
  src/api/tuning.cpp
  src/core/checks.cpp
  src/core/merge.cpp
  src/core/overlap.cpp
  src/core/quantise.cpp
  src/core/validate.cpp
  src/core/validate_cache.cpp
  src/core/validate_mask.cpp
  src/core/team.cpp
  src/core/tuning_bucket.cpp
  src/core/tuning_file.cpp
  src/cpu/contexts.cpp
  src/cpu/decode_items.cpp
  src/cpu/dispatch.cpp
  src/cpu/fill_plan.cpp
  src/cpu/launch.cpp
  src/cpu/mask_pack.cpp
  src/cpu/merge.cpp
  src/cpu/quantise.cpp)
add_library(strobe_objects OBJECT ${sources})
if(STROBE_RANDOM_WALKS)
  target_sources(strobe_objects PRIVATE src/core/random_blocks.cpp)
  target_compile_definitions(strobe_objects PRIVATE STROBE_RANDOM_WALKS=1)
endif()

# Builds whose only purpose is to run (under a sanitizer, with a defect) leave out what this machine cannot run.
set(STROBE_CPU_ISAS ALL CACHE STRING
    "Instruction sets to build kernels for: ALL, NATIVE (those that this machine can run), or a list, e.g. portable;avx2")
# In the CPU back end alone, so that the rest need not be compiled for each defect; and in all of it, for launch.cpp, fill_plan.cpp
# and decode_items.cpp divide the work by the mask that the kernels apply.
if(STROBE_BREAK_KERNEL)
  string(TOUPPER ${STROBE_BREAK_KERNEL} defect)
  file(GLOB cpu CONFIGURE_DEPENDS src/cpu/*.cpp)
  set_source_files_properties(${cpu} PROPERTIES COMPILE_DEFINITIONS STROBE_BREAK_KERNEL_${defect}=1)
endif()

set(isas "${STROBE_CPU_ISAS}")
if(isas STREQUAL NATIVE AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu LIMIT_COUNT 1 REGEX "^(flags|Features)")
  set(isas portable neon)
  foreach(pair avx2:avx2 avx512:avx512vl avx512_bf16:avx512_bf16 amx:amx_bf16)
    string(REPLACE ":" ";" pair ${pair})
    list(POP_FRONT pair isa feature)
    if("${cpu} " MATCHES " ${feature} ")
      list(APPEND isas ${isa})
    endif()
  endforeach()
elseif(isas STREQUAL NATIVE)
  set(isas ALL)
endif()
set(known_isas portable avx2 avx512 avx512_bf16 amx neon)
foreach(isa ${isas})
  if(NOT isa STREQUAL ALL AND NOT isa IN_LIST known_isas)
    message(FATAL_ERROR "STROBE_CPU_ISAS has ${isa}, expected ALL, NATIVE, or some of ${known_isas}")
  endif()
endforeach()
list(APPEND isas portable)  # the library takes it where it has nothing else

# strobe_isa(NAME FILE FLAG...): one instruction set's kernels. They stand in a file of their own with their own flags,
# and dispatch.cpp learns of them through STROBE_HAVE_<NAME>. tests/build checks that no function that other files
# share is emitted there: the linker might pick that copy, and an older CPU would stop at it.
function(strobe_isa name file)
  strobe_sources(found ${file})
  if(found AND (ALL IN_LIST isas OR name IN_LIST isas))
    target_sources(strobe_objects PRIVATE ${found})
    set_source_files_properties(${found} PROPERTIES COMPILE_OPTIONS "${ARGN}")
    string(TOUPPER ${name} upper)
    target_compile_definitions(strobe_objects PRIVATE STROBE_HAVE_${upper}=1)
    set_property(TARGET strobe_objects APPEND PROPERTY STROBE_ISAS ${name})
  endif()
endfunction()

# What hwy/detect_targets.h wants for HWY_AVX2 and HWY_AVX3, and what core/machine.cpp asks the CPU for: the same list.
set(avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2 -DHWY_DISABLE_PCLMUL_AES)
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mprefer-vector-width=512)
# Kernels under sanitizers. Of GCC's time over them half is for AddressSanitizer's marks at each begin and end of a vector's
# scope, which nothing there outlives by a pointer; Clang 14 takes minutes with both sanitizers, and the asan preset, by GCC,
# has both.
if(STROBE_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(sanitize -fno-sanitize-address-use-after-scope)
elseif(STROBE_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(sanitize -fno-sanitize=undefined)
endif()
# The kernels say themselves where a product and a sum are one operation: a compiler that fuses more has forward and
# backward round a score differently.
set(kernel -ffp-contract=off ${sanitize})
strobe_isa(portable src/cpu/kernels_portable.cpp ${kernel})
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  strobe_isa(avx2 src/cpu/kernels_avx2.cpp ${avx2} ${kernel})
  strobe_isa(avx512 src/cpu/kernels_avx512.cpp ${avx512} ${kernel})
  strobe_isa(avx512_bf16 src/cpu/kernels_avx512_bf16.cpp ${avx512} -mavx512bf16 ${kernel})
  # Nothing there throws; without the flag GCC 12 refers to the shared handler of exceptions all the same.
  strobe_isa(amx src/cpu/amx_bf16.cpp ${avx512} ${kernel} -mavx512bf16 -mamx-tile -mamx-bf16 -fno-exceptions)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  # Highway's HWY_NEON includes AES on 64-bit Arm.
  strobe_isa(neon src/cpu/kernels_neon.cpp -march=armv8-a+crypto ${kernel})
endif()

target_include_directories(strobe_objects
  PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
  PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_include_directories(strobe_objects SYSTEM PRIVATE "${STROBE_HIGHWAY_INCLUDE_DIR}")
# Highway's debug assertions call into its library part, and a library does not abort its caller's program.
target_compile_definitions(strobe_objects PRIVATE HWY_IS_DEBUG_BUILD=0)
target_link_libraries(strobe_objects PRIVATE strobe_flags OpenMP::OpenMP_CXX)

# The libraries besides libstrobe that a static link needs; cmake/cuda.cmake adds to them.
set(STROBE_STATIC_LIBS ${OpenMP_CXX_LIB_NAMES})

add_library(strobe SHARED $<TARGET_OBJECTS:strobe_objects>)
add_library(strobe_static STATIC $<TARGET_OBJECTS:strobe_objects>)
add_library(strobe::strobe ALIAS strobe)
add_library(strobe::strobe_static ALIAS strobe_static)
foreach(target strobe strobe_static)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME strobe LINKER_LANGUAGE CXX)
  # strobe.hpp needs C++20. Who includes strobe.h alone, in C or in older C++, links strobe::c or strobe::c_static: the
  # same library, and nothing asked of the language.
  target_compile_features(${target} INTERFACE cxx_std_20)
  string(REPLACE strobe strobe_c c_target ${target})
  string(REPLACE strobe_c c c_name ${c_target})
  add_library(${c_target} INTERFACE)
  add_library(strobe::${c_name} ALIAS ${c_target})
  set_target_properties(${c_target} PROPERTIES EXPORT_NAME ${c_name})
  target_link_libraries(${c_target} INTERFACE "$<LINK_ONLY:${target}>")
  foreach(header_user ${target} ${c_target})
    target_include_directories(${header_user} INTERFACE
      "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  endforeach()
endforeach()

set(exports "${PROJECT_SOURCE_DIR}/cmake/exports.map")
set_target_properties(strobe PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} LINK_DEPENDS "${exports}")
target_link_options(strobe PRIVATE "LINKER:--version-script=${exports}")
if(NOT STROBE_SANITIZE)
  target_link_options(strobe PRIVATE LINKER:--no-undefined)  # sanitizers leave symbols for the program to bring
endif()
target_link_libraries(strobe PRIVATE OpenMP::OpenMP_CXX)
# By name when installed: the consumer's machine has its own paths.
target_link_libraries(strobe_static PRIVATE
  "$<BUILD_INTERFACE:OpenMP::OpenMP_CXX>" "$<INSTALL_INTERFACE:${STROBE_STATIC_LIBS}>")

# The CUDA kernels add their objects and libraries to these targets.
if(EXISTS "${PROJECT_SOURCE_DIR}/src/cuda/CMakeLists.txt")
  include(cuda)
endif()
include(nvtx)
