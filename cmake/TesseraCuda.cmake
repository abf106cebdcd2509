# The headers of CUDA and NCCL for src/comm/backends/nccl, as the target tessera_cuda_headers; nothing else of ours
# includes them. TESSERA_HAS_CUDA becomes OFF where TESSERA_CUDA is AUTO and they are not there.
#
# cuda_runtime_api.h, crt/ and nv/ come from the toolkit or from the wheels nvidia-cuda-runtime, -crt and -cccl; nccl.h
# from a package or from nvidia-nccl. Of the mathematical libraries libtorch's headers want a few
# names only: they are written here where the libraries are not installed.
if(NOT TESSERA_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TESSERA_CUDA: found ${TESSERA_CUDA}, expected AUTO, ON or OFF")
endif()

# Of CUDA 13 pip's torch brings cuda_runtime_api.h and neither crt/ nor nv/, without which nothing compiles that includes it.
function(tessera_has_crt whole folder)
  if(NOT EXISTS ${folder}/crt/host_defines.h)
    set(${whole} FALSE PARENT_SCOPE)
  endif()
endfunction()

if(TESSERA_HAS_CUDA)
  find_program(TESSERA_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(TESSERA_NVCC)
    file(REAL_PATH ${TESSERA_NVCC} nvcc)
    cmake_path(GET nvcc PARENT_PATH nvcc)
  endif()
  file(GLOB tessera_nvidia_wheels ${TORCH_INSTALL_PREFIX}/../nvidia/*/include)
  find_path(TESSERA_CUDA_INCLUDE cuda_runtime_api.h
    HINTS $ENV{CUDA_HOME}/include ${tessera_nvidia_wheels} ${nvcc}/../include /usr/local/cuda/include
    VALIDATOR tessera_has_crt)
  find_path(TESSERA_CCCL_INCLUDE nv/target HINTS ${TESSERA_CUDA_INCLUDE} ${tessera_nvidia_wheels} PATH_SUFFIXES cccl)
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS $ENV{NCCL_HOME}/include ${tessera_nvidia_wheels} ${TESSERA_CUDA_INCLUDE})
  if(NOT TESSERA_CUDA_INCLUDE OR NOT TESSERA_CCCL_INCLUDE OR NOT TESSERA_NCCL_INCLUDE)
    set(missing "libtorch has CUDA, but its headers are not all there (cuda_runtime_api.h with crt/: ${TESSERA_CUDA_INCLUDE}, \
nv/target: ${TESSERA_CCCL_INCLUDE}, nccl.h: ${TESSERA_NCCL_INCLUDE}); install them (pip has them in nvidia-cuda-runtime, \
nvidia-cuda-crt, nvidia-cuda-cccl and nvidia-nccl), or set CUDA_HOME and NCCL_HOME")
    if(TESSERA_CUDA STREQUAL "ON")
      message(FATAL_ERROR "TESSERA_CUDA is ON: ${missing}")
    endif()
    message(WARNING "Built without CUDA: ${missing}")
    set(TESSERA_HAS_CUDA OFF)
  endif()
elseif(TESSERA_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TESSERA_CUDA is ON: found libtorch ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX} without CUDA, "
    "expected one with libtorch_cuda.so; choose it by TESSERA_TORCH")
endif()
message(STATUS "libtorch ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX}, CUDA: ${TESSERA_HAS_CUDA}")

if(TESSERA_HAS_CUDA)
  set(names ${CMAKE_BINARY_DIR}/cuda_names)
  file(CONFIGURE OUTPUT ${names}/cublas_v2.h
    CONTENT "typedef struct cublasContext* cublasHandle_t;\ntypedef int cublasStatus_t;\n")
  file(CONFIGURE OUTPUT ${names}/cublasLt.h CONTENT "typedef struct cublasLtContext* cublasLtHandle_t;\n")
  file(CONFIGURE OUTPUT ${names}/cusparse.h CONTENT "typedef struct cusparseContext* cusparseHandle_t;\ntypedef int cusparseStatus_t;\n")
  file(CONFIGURE OUTPUT ${names}/cusolver_common.h CONTENT "typedef int cusolverStatus_t;\n")
  file(CONFIGURE OUTPUT ${names}/cusolverDn.h CONTENT "typedef struct cusolverDnContext* cusolverDnHandle_t;\n")
  add_library(tessera_cuda_headers INTERFACE IMPORTED)
  set_target_properties(tessera_cuda_headers PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_CUDA_INCLUDE};${TESSERA_CCCL_INCLUDE};${TESSERA_NCCL_INCLUDE}"
    INTERFACE_COMPILE_OPTIONS "SHELL:-idirafter ${names}"
    INTERFACE_COMPILE_DEFINITIONS "USE_C10D_NCCL;C10_USING_CUSTOM_GENERATED_MACROS")
endif()
