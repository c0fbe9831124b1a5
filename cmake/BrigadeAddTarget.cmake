# Functions that define brigade's targets: compile flags, precompiled headers,
# install rules and tests.

# Sets the flags of all of brigade's code. A shared precompiled header requires
# equal flags, except for optimization and checks; -fPIC is therefore set for
# executables too.
function(brigade_set_flags target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CUDA_EXTENSIONS OFF)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(
    ${target}
    PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC -Wall -Wextra -Wno-unused-parameter>
            # GCC collects garbage above this heap size only (KiB): 1/6 less time,
            # 1/12 more memory.
            $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=4000000>
            # CMake 3.25 does not support CUDA C++20.
            $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -Xcompiler=-fPIC>)
  target_include_directories(
    ${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include> $<INSTALL_INTERFACE:include>)
endfunction()

# brigade_use_pch(<target> <c10d|torch>): uses one of cmake/'s precompiled headers,
# which the target brigade_<name>_pch compiles once.
function(brigade_use_pch target name)
  if(NOT BRIGADE_PCH)
    return()
  endif()
  set(maker brigade_${name}_pch)
  if(NOT TARGET ${maker})
    set(source ${PROJECT_BINARY_DIR}/${name}_pch.cc)
    if(NOT EXISTS ${source})
      file(WRITE ${source} "")
    endif()
    add_library(${maker} OBJECT ${source})
    brigade_set_flags(${maker})
    target_link_libraries(${maker} PRIVATE Torch::cpu)
    target_compile_options(${maker} PRIVATE -fpch-preprocess)
    target_precompile_headers(${maker} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/${name}_pch.h)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess
                                           -Winvalid-pch>)
  target_precompile_headers(${target} REUSE_FROM ${maker})
endfunction()

# brigade_add_library(<folder> SOURCES a.cc ...
#                     [CUDA_SOURCES x_cuda.cu ... WITHOUT_CUDA_SOURCES x_without_cuda.cc ...]
#                     [PUBLIC ...] [PRIVATE ...] [PCH torch] [NO_TORCH])
# Defines and installs brigade_<folder>, with the alias brigade::<folder>.
# CUDA_SOURCES are .cu or .cc files that link Torch::cuda. PCH: the precompiled
# header, c10d by default. NO_TORCH: the library does not use LibTorch.
function(brigade_add_library folder)
  cmake_parse_arguments(ARG "NO_TORCH" "PCH" "SOURCES;CUDA_SOURCES;WITHOUT_CUDA_SOURCES;PUBLIC;PRIVATE"
                        ${ARGN})
  if(NOT ARG_PCH)
    set(ARG_PCH c10d)
  endif()
  set(target brigade_${folder})
  add_library(${target} ${ARG_SOURCES})
  add_library(brigade::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  brigade_set_flags(${target})
  target_link_libraries(${target} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
  if(NOT ARG_NO_TORCH)
    brigade_use_pch(${target} ${ARG_PCH})
  endif()

  if(ARG_CUDA_SOURCES AND BRIGADE_WITH_CUDA)
    # A separate target, because CUDA's definitions don't match the precompiled
    # header's.
    add_library(${target}_cuda OBJECT ${ARG_CUDA_SOURCES})
    brigade_set_flags(${target}_cuda)
    target_link_libraries(${target}_cuda PRIVATE ${ARG_PUBLIC} ${ARG_PRIVATE} Torch::cuda)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
    target_link_libraries(${target} PRIVATE Torch::cuda_libraries)
  else()
    target_sources(${target} PRIVATE ${ARG_WITHOUT_CUDA_SOURCES})
  endif()

  if(BRIGADE_INSTALL)
    install(TARGETS ${target} EXPORT brigadeTargets)
  endif()
endfunction()

# brigade_add_executable(<name> SOURCES ... LIBS ... [NO_TORCH])
function(brigade_add_executable name)
  cmake_parse_arguments(ARG "NO_TORCH;LONG" "" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  brigade_set_flags(${name})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS})
  if(NOT ARG_NO_TORCH)
    brigade_use_pch(${name} torch)
  endif()
endfunction()

# Halves the compile time of test code: less optimization, no undefined-behaviour
# checks. The library keeps both.
function(brigade_compile_fast name)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[a-z,]*undefined")
    target_compile_options(${name} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# brigade_add_test(<name> SOURCES ... LIBS ... [LABELS gpu] [NO_TORCH] [LONG])
# Defines a GoogleTest binary with gmock's main, and one ctest test that runs it.
# LABELS: cpp and <name> by default. LONG: only with BRIGADE_ALL_TESTS.
function(brigade_add_test name)
  cmake_parse_arguments(ARG "NO_TORCH;LONG" "" "SOURCES;LIBS;LABELS" ${ARGN})
  if(ARG_LONG AND NOT BRIGADE_ALL_TESTS)
    return()
  endif()
  brigade_add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE GTest::gmock_main)
  brigade_compile_fast(${name})
  # LibTorch's headers take 8 s per translation unit even when precompiled.
  set_target_properties(${name} PROPERTIES UNITY_BUILD_BATCH_SIZE 16)
  if(NOT ARG_LABELS)
    set(ARG_LABELS cpp ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(
    ${name}
    PROPERTIES
      TIMEOUT
      1200
      LABELS
      "${ARG_LABELS}"
      ENVIRONMENT
      "ASAN_OPTIONS=detect_leaks=1;LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0;UBSAN_OPTIONS=print_stacktrace=1;TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:halt_on_error=0:print_suppressions=0"
  )
endfunction()
