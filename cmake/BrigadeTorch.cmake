# Finds a supported LibTorch and defines the imported target Torch::cpu. Defines
# Torch::cuda if LibTorch was built with CUDA and CUDA's headers are found. This
# tree and installed brigade packages include this file.
#
# find_package(Torch) would require a CUDA toolkit even for CPU code. A project
# may use both.
#
# In:   BRIGADE_LIBTORCH  a folder with include/ and lib/ (an unpacked LibTorch)
#       BRIGADE_PYTHON    a Python that has the torch wheel
#       BRIGADE_TORCH_HINT_PYTHON, BRIGADE_TORCH_HINT_ROOT
#                         where to search if neither is set
#       BRIGADE_TORCH_BUILT_AGAINST
#                         the version that installed libraries of brigade were
#                         built against; other minor versions are errors
# Out:  BRIGADE_TORCH_FOUND, BRIGADE_TORCH_VERSION, BRIGADE_TORCH_ROOT,
#       BRIGADE_TORCH_MESSAGE (the reason if not found),
#       BRIGADE_TORCH_SUPPORTED (the supported versions, as text),
#       BRIGADE_TORCH_PYTHON (the wheel's Python; empty for an unpacked LibTorch),
#       BRIGADE_TORCH_NVIDIA (the wheel's CUDA packages; may be empty),
#       BRIGADE_TORCH_CUDA_MAJOR (LibTorch's CUDA version; empty if none),
#       BRIGADE_TORCH_CUDA_MESSAGE (the reason if there is no Torch::cuda)
include_guard(DIRECTORY)

# The cache entries below must not override variables of a list file.
if(POLICY CMP0126)
  cmake_policy(SET CMP0126 NEW)
endif()

# Minor versions, which differ in their binary interface. Python and the scripts
# read this file too.
set(brigade_versions_file ${CMAKE_CURRENT_LIST_DIR}/torch_versions.json)
set_property(
  DIRECTORY
  APPEND
  PROPERTY CMAKE_CONFIGURE_DEPENDS ${brigade_versions_file})
file(READ ${brigade_versions_file} brigade_versions)
string(JSON brigade_versions GET "${brigade_versions}" supported)
string(REGEX MATCHALL "[0-9]+\\.[0-9]+" BRIGADE_TORCH_MINORS "${brigade_versions}")
list(GET BRIGADE_TORCH_MINORS 0 brigade_oldest)
list(GET BRIGADE_TORCH_MINORS -1 brigade_newest)
set(BRIGADE_TORCH_SUPPORTED "${brigade_oldest} to ${brigade_newest}")

set(BRIGADE_LIBTORCH
    ""
    CACHE PATH "An unpacked LibTorch; empty: the wheel of BRIGADE_PYTHON")
set(BRIGADE_PYTHON
    ""
    CACHE FILEPATH "A Python with the torch wheel; empty: search for one")

# Sets `out` to the folder of `python`'s package `name`, or to "". Does not import
# the package.
function(brigade_python_package python name out)
  set(program
      "import importlib.util as u; s = u.find_spec('${name}')\nprint(next(iter(s.submodule_search_locations)) if s else '')"
  )
  execute_process(
    COMMAND ${python} -c "${program}"
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    set(folder "")
  endif()
  set(${out}
      "${folder}"
      PARENT_SCOPE)
endfunction()

# Sets BRIGADE_TORCH_ROOT and, for a wheel, BRIGADE_TORCH_NVIDIA.
function(brigade_locate_torch)
  set(pythons "")
  set(nvidia "")
  set(owner "")
  if(BRIGADE_PYTHON AND NOT EXISTS ${BRIGADE_PYTHON})
    message(FATAL_ERROR "brigade: BRIGADE_PYTHON is '${BRIGADE_PYTHON}', which does not exist.  "
                        "Set it to a Python that has torch ${BRIGADE_TORCH_SUPPORTED}.")
  endif()
  if(NOT BRIGADE_PYTHON)
    if(EXISTS "${BRIGADE_TORCH_HINT_PYTHON}")
      list(APPEND pythons ${BRIGADE_TORCH_HINT_PYTHON})
    endif()
    if(DEFINED ENV{VIRTUAL_ENV} AND EXISTS $ENV{VIRTUAL_ENV}/bin/python)
      list(APPEND pythons $ENV{VIRTUAL_ENV}/bin/python)
    endif()
    find_program(brigade_python3 python3 NO_CACHE)
    if(brigade_python3)
      list(APPEND pythons ${brigade_python3})
    endif()
  else()
    set(pythons ${BRIGADE_PYTHON})
  endif()

  set(root "")
  if(BRIGADE_LIBTORCH)
    get_filename_component(root ${BRIGADE_LIBTORCH} ABSOLUTE)
  elseif(NOT BRIGADE_PYTHON AND BRIGADE_TORCH_HINT_ROOT
         AND EXISTS ${BRIGADE_TORCH_HINT_ROOT}/lib/libtorch_cpu.so)
    set(root ${BRIGADE_TORCH_HINT_ROOT})
  else()
    foreach(python ${pythons})
      brigade_python_package(${python} torch root)
      if(root)
        set(owner ${python})
        break()
      endif()
    endforeach()
  endif()

  # A wheel's CUDA libraries are in the sibling folder nvidia/. If LibTorch was
  # copied out of a wheel, they are in a Python's nvidia packages.
  if(root AND EXISTS ${root}/lib/libtorch_cuda.so)
    file(GLOB own_cudart ${root}/lib/libcudart*.so*)
    if(NOT own_cudart)
      get_filename_component(beside ${root}/../nvidia ABSOLUTE)
      if(EXISTS ${beside})
        set(nvidia ${beside})
      else()
        foreach(python ${pythons})
          brigade_python_package(${python} nvidia nvidia)
          if(nvidia)
            break()
          endif()
        endforeach()
      endif()
    endif()
  endif()
  set(BRIGADE_TORCH_ROOT
      "${root}"
      PARENT_SCOPE)
  set(BRIGADE_TORCH_PYTHON
      "${owner}"
      PARENT_SCOPE)
  set(BRIGADE_TORCH_NVIDIA
      "${nvidia}"
      PARENT_SCOPE)
endfunction()

function(brigade_torch_version root out)
  set(version "")
  if(EXISTS ${root}/include/torch/headeronly/version.h)
    file(STRINGS ${root}/include/torch/headeronly/version.h lines
         REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
    foreach(line ${lines})
      string(REGEX REPLACE ".* ([0-9]+)$" "\\1" number "${line}")
      list(APPEND version ${number})
    endforeach()
    list(JOIN version "." version)
  elseif(EXISTS ${root}/build-version)
    file(READ ${root}/build-version version)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" version "${version}")
  endif()
  set(${out}
      "${version}"
      PARENT_SCOPE)
endfunction()

# Sets `out` to "" if `version` is supported, otherwise to the reason.
function(brigade_check_torch version root out)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" built_against "${BRIGADE_TORCH_BUILT_AGAINST}")
  set(why "")
  if(built_against AND NOT minor STREQUAL built_against)
    set(why
        "this brigade was built against torch ${built_against}, but found torch '${version}', which has another binary interface, at ${root}; set BRIGADE_PYTHON or BRIGADE_LIBTORCH to a torch ${built_against}, or rebuild brigade"
    )
  elseif(NOT minor IN_LIST BRIGADE_TORCH_MINORS)
    set(why
        "brigade supports torch ${BRIGADE_TORCH_SUPPORTED}, but found torch '${version}' at ${root}; install a supported version or set BRIGADE_PYTHON or BRIGADE_LIBTORCH"
    )
  endif()
  set(${out}
      "${why}"
      PARENT_SCOPE)
endfunction()

function(brigade_import_library name file)
  add_library(Torch::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(Torch::${name} PROPERTIES IMPORTED_LOCATION ${file})
endfunction()

function(brigade_import_torch)
  set(root ${BRIGADE_TORCH_ROOT})
  set(lib ${root}/lib)
  foreach(name c10 torch_cpu torch)
    brigade_import_library(${name} ${lib}/lib${name}.so)
  endforeach()
  target_include_directories(Torch::c10 INTERFACE ${root}/include
                                                  ${root}/include/torch/csrc/api/include)

  # Link libtorch.so although no symbol needs it: it loads the CUDA libraries,
  # whose kernels register themselves.
  add_library(Torch::cpu INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(Torch::cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  target_compile_features(Torch::cpu INTERFACE cxx_std_20)
  target_link_libraries(
    Torch::cpu
    INTERFACE Torch::c10
              "-Wl,--push-state,--no-as-needed,${lib}/libtorch.so,${lib}/libtorch_cpu.so,--pop-state")
  target_link_libraries(Torch::cpu INTERFACE Torch::torch Torch::torch_cpu)

  set(why "")
  if(NOT EXISTS ${lib}/libtorch_cuda.so)
    set(BRIGADE_TORCH_CUDA_MESSAGE
        "LibTorch at ${root} was built without CUDA"
        PARENT_SCOPE)
    return()
  endif()

  set(nvidia ${BRIGADE_TORCH_NVIDIA})
  set(cudart_name libcudart.so.${BRIGADE_TORCH_CUDA_MAJOR})
  file(GLOB cudart ${lib}/libcudart*.so*)
  set(hints "")
  if(nvidia)
    file(GLOB from_packages ${nvidia}/*/lib/${cudart_name})
    list(APPEND cudart ${from_packages})
    file(GLOB hints ${nvidia}/*/include)
  endif()
  if(NOT cudart)
    message(
      FATAL_ERROR
        "brigade: LibTorch at ${root} needs ${cudart_name}, which was not found in ${lib}, in "
        "${root}/../nvidia or in a Python's nvidia packages.  "
        "Set BRIGADE_PYTHON to a Python with torch ${BRIGADE_TORCH_SUPPORTED}, or use LibTorch's CPU build.")
  endif()
  list(GET cudart 0 cudart)
  if(nvidia)
    file(GLOB folders ${nvidia}/*/lib)
    get_filename_component(beside ${root}/../nvidia ABSOLUTE)
    foreach(folder ${folders})
      target_link_options(Torch::cpu INTERFACE "LINKER:-rpath-link,${folder}")
      if(NOT nvidia STREQUAL beside)
        # RPATH, not RUNPATH: only RPATH applies to the libraries that LibTorch
        # loads.
        target_link_options(Torch::cpu INTERFACE "LINKER:--disable-new-dtags,-rpath,${folder}")
      endif()
    endforeach()
  endif()

  brigade_import_library(c10_cuda ${lib}/libc10_cuda.so)
  brigade_import_library(torch_cuda ${lib}/libtorch_cuda.so)
  brigade_import_library(cudart ${cudart})
  add_library(Torch::cuda_libraries INTERFACE IMPORTED GLOBAL)
  target_link_libraries(Torch::cuda_libraries INTERFACE Torch::torch_cuda Torch::c10_cuda
                                                        Torch::cudart)

  list(APPEND hints $ENV{CUDA_HOME}/include /usr/local/cuda/include)
  find_path(BRIGADE_CUDA_INCLUDE cuda_runtime_api.h HINTS ${hints})
  find_path(BRIGADE_NCCL_INCLUDE nccl.h HINTS ${hints})
  mark_as_advanced(BRIGADE_CUDA_INCLUDE BRIGADE_NCCL_INCLUDE)
  if(NOT BRIGADE_CUDA_INCLUDE)
    set(why "no cuda_runtime_api.h was found")
  elseif(NOT BRIGADE_NCCL_INCLUDE)
    set(why "no nccl.h was found")
  else()
    add_library(Torch::cuda INTERFACE IMPORTED GLOBAL)
    target_compile_definitions(Torch::cuda INTERFACE USE_C10D_NCCL)
    target_include_directories(Torch::cuda INTERFACE ${BRIGADE_CUDA_INCLUDE}
                                                     ${BRIGADE_NCCL_INCLUDE})
    target_link_libraries(Torch::cuda INTERFACE Torch::cpu Torch::cuda_libraries)
  endif()
  set(BRIGADE_TORCH_CUDA_MESSAGE
      "${why}"
      PARENT_SCOPE)
endfunction()

brigade_locate_torch()
set(BRIGADE_TORCH_FOUND OFF)
set(BRIGADE_TORCH_MESSAGE "")
set(BRIGADE_TORCH_VERSION "")
set(BRIGADE_TORCH_CUDA_MAJOR "")
if(NOT BRIGADE_TORCH_ROOT AND BRIGADE_PYTHON)
  set(BRIGADE_TORCH_MESSAGE
      "BRIGADE_PYTHON, '${BRIGADE_PYTHON}', has no torch; install torch ${BRIGADE_TORCH_SUPPORTED} there or set another Python"
  )
elseif(NOT BRIGADE_TORCH_ROOT)
  set(BRIGADE_TORCH_MESSAGE
      "found neither a Python with torch nor a LibTorch; set BRIGADE_PYTHON or BRIGADE_LIBTORCH")
elseif(NOT EXISTS ${BRIGADE_TORCH_ROOT}/lib/libtorch_cpu.so OR NOT EXISTS
                                                               ${BRIGADE_TORCH_ROOT}/include/torch)
  set(BRIGADE_TORCH_MESSAGE
      "'${BRIGADE_TORCH_ROOT}' is not a LibTorch: it lacks include/torch or lib/libtorch_cpu.so")
else()
  brigade_torch_version(${BRIGADE_TORCH_ROOT} BRIGADE_TORCH_VERSION)
  brigade_check_torch("${BRIGADE_TORCH_VERSION}" ${BRIGADE_TORCH_ROOT} BRIGADE_TORCH_MESSAGE)
  if(NOT BRIGADE_TORCH_MESSAGE)
    set(BRIGADE_TORCH_FOUND ON)
    # The CUDA runtime that LibTorch links: an unpacked LibTorch has no metadata.
    if(EXISTS ${BRIGADE_TORCH_ROOT}/lib/libc10_cuda.so)
      file(STRINGS ${BRIGADE_TORCH_ROOT}/lib/libc10_cuda.so brigade_cudart
           REGEX "^libcudart[-0-9a-f]*\\.so\\.[0-9]+")
      string(REGEX MATCH "\\.so\\.([0-9]+)" brigade_cudart "${brigade_cudart}")
      set(BRIGADE_TORCH_CUDA_MAJOR "${CMAKE_MATCH_1}")
    endif()
    if(NOT TARGET Torch::cpu) # another folder may have defined it
      brigade_import_torch()
    endif()
  endif()
endif()
