# cmake --install: headers, both libraries, the tool, the licence, find_package(strobe) and pkg-config. All
# relocatable.

if(SKBUILD)
  include(wheel)
  # A wheel has no symbolic links and takes one file: the library, beside the Python code that loads it.
  install(FILES "$<TARGET_FILE:strobe>" DESTINATION . RENAME libstrobe.so COMPONENT python)
  install(TARGETS strobe_python LIBRARY DESTINATION . COMPONENT python)
  return()
endif()

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/strobe")

install(DIRECTORY include/strobe DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(TARGETS strobe strobe_static strobe_c strobe_c_static EXPORT strobe-targets)
if(TARGET strobe_cli)
  install(TARGETS strobe_cli)
endif()

install(EXPORT strobe-targets NAMESPACE strobe:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/strobe-config.cmake.in strobe-config.cmake INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(strobe-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/strobe-config.cmake" "${PROJECT_BINARY_DIR}/strobe-config-version.cmake"
        DESTINATION "${package_dir}")

# pkg-config finds the prefix from where the .pc file lies.
file(RELATIVE_PATH STROBE_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
list(TRANSFORM STROBE_STATIC_LIBS PREPEND "-l" OUTPUT_VARIABLE STROBE_PC_LIBS)
list(JOIN STROBE_PC_LIBS " " STROBE_PC_LIBS)
configure_file(cmake/strobe.pc.in strobe.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/strobe.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
