# What `cmake --install` adds to the libraries and headers of the folders: the
# package files that make find_package(brigade) work.
include(CMakePackageConfigHelpers)
set(brigade_config_folder lib/cmake/brigade)
install(
  EXPORT brigadeTargets
  NAMESPACE brigade::
  DESTINATION ${brigade_config_folder})
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/brigadeConfig.cmake.in ${PROJECT_BINARY_DIR}/brigadeConfig.cmake
  INSTALL_DESTINATION ${brigade_config_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/brigadeConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/brigadeConfig.cmake ${PROJECT_BINARY_DIR}/brigadeConfigVersion.cmake
        ${PROJECT_SOURCE_DIR}/cmake/BrigadeTorch.cmake ${PROJECT_SOURCE_DIR}/cmake/torch_versions.json
  DESTINATION ${brigade_config_folder})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION share/doc/brigade)
