# The command line tool and the examples. They link the static library, so that they run from wherever they are put.

set(missing)
foreach(package CLI11 fmt nlohmann_json)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND missing ${package})
  endif()
endforeach()
if(missing)
  list(JOIN missing ", " missing)
  set(hint "not found: ${missing} (Debian: apt install libcli11-dev libfmt-dev nlohmann-json3-dev)")
  set(wanted "${STROBE_BUILD_CLI};${STROBE_BUILD_EXAMPLES};${STROBE_BUILD_FUZZ}")
  list(FILTER wanted EXCLUDE REGEX "^(AUTO|OFF|0|NO|FALSE)$")
  if(NOT wanted)
    message(STATUS "building without the tool and the examples; ${hint}")
    return()
  endif()
  message(FATAL_ERROR "the tool, the examples and the fuzz targets need what was ${hint}")
endif()

# What any program may need of the tool: files and flags. The examples build in half the time without the rest.
set(basics flags safetensors safetensors_file text)
list(TRANSFORM basics REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/src/cli/\\1.cpp")
add_library(strobe_basics STATIC ${basics})
target_include_directories(strobe_basics PUBLIC "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(strobe_basics
  PUBLIC strobe_static CLI11::CLI11 fmt::fmt nlohmann_json::nlohmann_json
  PRIVATE strobe_flags)

# What the tool shares with the fuzz targets: its commands and tables.
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cli/*.cpp")
list(REMOVE_ITEM sources "${PROJECT_SOURCE_DIR}/src/cli/main.cpp" ${basics})
add_library(strobe_tool STATIC ${sources})
target_link_libraries(strobe_tool PUBLIC strobe_basics PRIVATE strobe_fixture strobe_flags)
target_include_directories(strobe_tool PRIVATE "${PROJECT_SOURCE_DIR}")  # check/
# Templates of other libraries take long to optimise, with sanitizers minutes. Nothing of the tool computes.
set(optimised -O1)
if(STROBE_SANITIZE)
  set(optimised -O0)
endif()
target_compile_options(strobe_basics PRIVATE ${optimised})
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS ${optimised})

# `--device cuda` copies tensors to the GPU and back itself.
if(TARGET strobe_cuda_objects)
  target_compile_definitions(strobe_tool PRIVATE STROBE_HAVE_CUDA=1)
  target_include_directories(strobe_tool SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(strobe_tool PRIVATE CUDA::cudart_static)
endif()

# strobe_program(TARGET NAME SOURCE LIBRARY): bin/NAME in the build tree, if SOURCE is there.
function(strobe_program target name source library)
  strobe_sources(sources ${source})
  if(sources)
    add_executable(${target} ${sources})
    set_target_properties(${target} PROPERTIES
      OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
    target_link_libraries(${target} PRIVATE strobe_flags ${library})
  endif()
endfunction()

if(STROBE_BUILD_CLI)
  strobe_program(strobe_cli strobe src/cli/main.cpp strobe_tool)
endif()
if(STROBE_BUILD_EXAMPLES)
  strobe_program(strobe_demo strobe_demo examples/demo.cpp strobe_basics)
  strobe_program(strobe_quickstart quickstart examples/consumer/quickstart.cpp strobe_basics)
  strobe_program(strobe_generate generate examples/generate.cpp strobe_basics)
  strobe_program(strobe_paged_cache paged_cache examples/paged_cache.cpp strobe_basics)
  strobe_program(strobe_shared_prefix shared_prefix examples/shared_prefix.cpp strobe_basics)
  strobe_program(strobe_moba moba examples/moba.cpp strobe_basics)
  strobe_program(strobe_train train examples/consumer/train.cpp strobe_basics)
  strobe_program(strobe_llama_block llama_block examples/llama_block.cpp strobe_basics)
  strobe_program(strobe_ring_two_gpus ring_two_gpus examples/ring_two_gpus.cpp strobe_basics)
  strobe_program(strobe_ring_ranks ring_ranks examples/ring_ranks.cpp strobe_basics)
  # Where their data is. __FILE__ would not do: ccache makes it relative to the build folder.
  foreach(target strobe_demo strobe_generate)
    if(TARGET ${target})
      target_compile_definitions(${target} PRIVATE STROBE_EXAMPLES="${PROJECT_SOURCE_DIR}/examples")
    endif()
  endforeach()
endif()
