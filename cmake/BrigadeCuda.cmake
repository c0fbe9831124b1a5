# Enables CUDA if an nvcc is found: the user's, a toolkit's, or one that pip
# installed next to torch. Include from the root list file, after BrigadeTorch.
#
# In:   BRIGADE_CUDA        AUTO, ON or OFF
# Out:  BRIGADE_WITH_CUDA   ON or OFF

set(BRIGADE_CUDA
    AUTO
    CACHE STRING "Build CUDA files: AUTO (if an nvcc is found), ON or OFF")
set_property(CACHE BRIGADE_CUDA PROPERTY STRINGS AUTO ON OFF)

# Sets `out` to an nvcc of LibTorch's CUDA major version, or to "".
function(brigade_find_nvcc out)
  set(candidates ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} $ENV{CUDA_HOME}/bin/nvcc nvcc
                 /usr/local/cuda/bin/nvcc)
  if(BRIGADE_TORCH_NVIDIA)
    file(GLOB beside_torch ${BRIGADE_TORCH_NVIDIA}/*/bin/nvcc)
    list(APPEND candidates ${beside_torch})
  endif()
  set(${out}
      ""
      PARENT_SCOPE)
  foreach(candidate ${candidates})
    execute_process(
      COMMAND ${candidate} --version
      OUTPUT_VARIABLE text
      ERROR_QUIET
      RESULT_VARIABLE result)
    if(result EQUAL 0 AND text MATCHES "release ${BRIGADE_TORCH_CUDA_MAJOR}\\.")
      set(${out}
          ${candidate}
          PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(BRIGADE_WITH_CUDA OFF)
if(BRIGADE_CUDA STREQUAL "AUTO" OR BRIGADE_CUDA)
  brigade_find_nvcc(brigade_nvcc)
  if(NOT TARGET Torch::cuda)
    set(brigade_no_cuda "${BRIGADE_TORCH_CUDA_MESSAGE}")
  elseif(NOT brigade_nvcc)
    set(brigade_no_cuda
        "no nvcc ${BRIGADE_TORCH_CUDA_MAJOR}.x was found; scripts/setup.sh installs one into .venv")
  else()
    set(brigade_no_cuda "")
  endif()

  if(NOT brigade_no_cuda)
    set(BRIGADE_WITH_CUDA ON)
    set(CMAKE_CUDA_COMPILER ${brigade_nvcc})
    set(CMAKE_CUDA_RUNTIME_LIBRARY None) # use LibTorch's libcudart
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90)
    endif()
    if(BRIGADE_TORCH_NVIDIA AND brigade_nvcc MATCHES "^${BRIGADE_TORCH_NVIDIA}/")
      # nvcc searches lib64; pip's packages have lib.
      get_filename_component(toolkit ${brigade_nvcc}/../../lib ABSOLUTE)
      set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}")
    endif()
    enable_language(CUDA)
    message(
      STATUS
        "brigade: CUDA files are built by ${CMAKE_CUDA_COMPILER} (${CMAKE_CUDA_COMPILER_VERSION}) for ${CMAKE_CUDA_ARCHITECTURES}"
    )
  elseif(BRIGADE_CUDA STREQUAL "AUTO")
    message(STATUS "brigade: CUDA files are not built: ${brigade_no_cuda}")
  else()
    message(FATAL_ERROR "brigade: BRIGADE_CUDA is ON, but ${brigade_no_cuda}.  "
                        "Install it or set BRIGADE_CUDA=OFF.")
  endif()
else()
  message(STATUS "brigade: CUDA files are not built: BRIGADE_CUDA is OFF")
endif()
