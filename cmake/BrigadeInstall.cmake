# Install rules of the public headers and of the package files for
# find_package(brigade).
include(CMakePackageConfigHelpers)

# The public headers are brigade.h and the headers it includes.
if(BRIGADE_WITH_TORCH)
  set(brigade_headers brigade.h)
else()
  file(GLOB brigade_headers RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/planning/*.h
       ${PROJECT_SOURCE_DIR}/simulation/simulation_json.h)
endif()
set(brigade_installed)
while(brigade_headers)
  list(POP_FRONT brigade_headers header)
  if(header IN_LIST brigade_installed)
    continue()
  endif()
  list(APPEND brigade_installed ${header})
  file(STRINGS ${PROJECT_SOURCE_DIR}/${header} lines REGEX "^#include \"brigade/")
  foreach(line ${lines})
    string(REGEX REPLACE "^#include \"brigade/([^\"]+)\".*" "\\1" included ${line})
    list(APPEND brigade_headers ${included})
  endforeach()
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/${header} DESTINATION include/brigade/${folder})
endwhile()

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
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
        DESTINATION share/doc/brigade)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION share/doc/brigade)
