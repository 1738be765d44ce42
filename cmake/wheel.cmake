# What pip and `make wheel` build, beyond what every build does.

include(announce)

# Python looks for one name in the extension. The standard library's templates stay inside.
file(CONFIGURE OUTPUT python.map CONTENT "{ global: PyInit__core; local: *; };\n")
target_link_options(strobe_python PRIVATE "LINKER:--version-script=${PROJECT_BINARY_DIR}/python.map")

if(NOT STROBE_MANYLINUX)
  return()
endif()

set(stand_ins "${PROJECT_SOURCE_DIR}/cmake/manylinux.cpp")
# Of these each library keeps what it uses.
set_source_files_properties("${stand_ins}" PROPERTIES COMPILE_OPTIONS "-ffunction-sections;-fdata-sections")
foreach(target strobe strobe_python)
  target_sources(${target} PRIVATE "${stand_ins}")
  target_link_options(${target} PRIVATE LINKER:--gc-sections LINKER:-s)
endforeach()

# GNU's OpenMP run time goes with the wheel under its own name, as PyTorch's wheel has it: whichever of the two is loaded
# first serves both, and a process keeps one pool of threads.
install(FILES "${sysroot_libraries}/libgomp.so.1.0.0" DESTINATION . RENAME libgomp.so.1 COMPONENT python)
set_target_properties(strobe PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")

# strobe_licence(NAME FILE...): the first FILE that is there, as third-party/NAME.txt among the wheel's licences.
function(strobe_licence name)
  foreach(file IN LISTS ARGN)
    if(EXISTS "${file}" AND NOT IS_DIRECTORY "${file}")
      install(FILES "${file}" DESTINATION "${SKBUILD_METADATA_DIR}/licenses/third-party" RENAME ${name}.txt COMPONENT python)
      return()
    endif()
  endforeach()
  list(JOIN ARGN ", " looked)
  message(FATAL_ERROR "a wheel carries the licences of what it contains, but there is no text for ${name}; looked for ${looked}")
endfunction()

strobe_licence(README "${PROJECT_SOURCE_DIR}/cmake/third-party.txt")
strobe_licence(gcc "${STROBE_SYSROOT}/usr/share/doc/gcc-10-base/copyright")
strobe_licence(gpl-3 /usr/share/common-licenses/GPL-3)
strobe_licence(apache-2.0 /usr/share/common-licenses/Apache-2.0)
strobe_licence(highway /usr/share/doc/libhwy-dev/copyright)
if(TARGET strobe_cuda_objects)
  # The toolkit's own installer puts it at the top; pip's packages put it among their metadata.
  get_filename_component(toolkit "${CUDAToolkit_BIN_DIR}" DIRECTORY)
  file(GLOB of_pip "${toolkit}/dist-info/nvidia_cuda_runtime*/licenses/License.txt"
       "${toolkit}/dist-info/nvidia_cuda_runtime*/License.txt" "${toolkit}/../../nvidia_cuda_runtime*/licenses/License.txt"
       "${toolkit}/../../nvidia_cuda_runtime*/License.txt")
  strobe_licence(cuda "${STROBE_CUDA_LICENCE}" "${toolkit}/EULA.txt" "${toolkit}/doc/EULA.txt" ${of_pip})
endif()
