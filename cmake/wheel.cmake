# What pip and `make wheel` build, beyond what every build does.

if(NOT TARGET strobe_cuda_objects)
  message(NOTICE
    "strobe: built for the CPU alone, since ${STROBE_NO_CUDA_REASON}. For CUDA kernels: install CUDA's toolkit, 12.4 or newer, "
    "so that nvcc is on the PATH, and build again with `pip install -v -C cmake.define.STROBE_CUDA=ON .`, which takes 10 to 20 "
    "minutes on two cores; or install a wheel that has them (`make wheel`).")
endif()

if(STROBE_MANYLINUX)
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
endif()
