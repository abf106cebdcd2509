# libtorch from its folder, that of pip's torch or of an unpacked libtorch. Not by libtorch's own CMake
# file: that of a build with CUDA wants all of NVIDIA's toolkit and its compiler. Used by the build
# and, installed, by find_package(Tessera).
#
# The minor versions that Tessera builds with: this is the one place that says so. docs/proofs.md has those that were
# tested, and when.
set(TESSERA_TORCH_OLDEST 2.11)
set(TESSERA_TORCH_NEWEST 2.15)

# tessera_find_torch([CUDA AUTO|ON|OFF] [HINTS folders...]): the first folder that these name: Torch_DIR, Torch_ROOT (also of the
# environment), CMAKE_PREFIX_PATH, Torch_DIR, CMAKE_PREFIX_PATH and TESSERA_TORCH of the environment, a hint. Sets
# TORCH_INSTALL_PREFIX, Torch_VERSION, Torch_MINOR (2.13) and TESSERA_HAS_CUDA; without libtorch the versions are empty.
# tessera_torch_target(PROBLEM): the target `Tessera::torch` from what these say, or from the target `torch` where a project has
# one already: find_package(Torch) may come before or after. PROBLEM: why that one cannot be taken; empty where it can.

# tessera_torch_version(VERSION folders...): of the first header among these include folders that says it, or empty.
function(tessera_torch_version version)
  set(numbers)
  foreach(folder ${ARGN})
    # The last ones up to 2.9; later they only include the first.
    foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h torch/version.h)
      if(NOT numbers AND EXISTS ${folder}/${header})
        file(STRINGS ${folder}/${header} numbers REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
        list(TRANSFORM numbers REPLACE ".*[^0-9]([0-9]+)$" "\\1")
      endif()
    endforeach()
  endforeach()
  list(JOIN numbers . numbers)
  set(${version} "${numbers}" PARENT_SCOPE)
endfunction()

function(tessera_find_torch)
  cmake_parse_arguments(T "" "CUDA" "HINTS" ${ARGN})
  set(candidates)
  cmake_path(CONVERT "$ENV{CMAKE_PREFIX_PATH}" TO_CMAKE_PATH_LIST prefixes)
  foreach(prefix ${Torch_DIR} ${Torch_ROOT} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH} $ENV{Torch_DIR} ${prefixes} $ENV{TESSERA_TORCH})
    # Its folder itself, or those in which its CMake files stand.
    list(APPEND candidates ${prefix} ${prefix}/../.. ${prefix}/../../..)
  endforeach()
  list(APPEND candidates ${T_HINTS})
  set(root "")
  foreach(candidate ${candidates})
    if(NOT root AND EXISTS ${candidate}/include/torch/csrc/api/include/torch/torch.h
       AND EXISTS ${candidate}/lib/libtorch_cpu.so)
      get_filename_component(root ${candidate} ABSOLUTE)
    endif()
  endforeach()
  set(TORCH_INSTALL_PREFIX "${root}" PARENT_SCOPE)
  set(Torch_VERSION "" PARENT_SCOPE)
  set(Torch_MINOR "" PARENT_SCOPE)
  set(TESSERA_HAS_CUDA OFF PARENT_SCOPE)
  if(NOT root)
    return()
  endif()

  tessera_torch_version(version ${root}/include)
  set(Torch_VERSION "${version}" PARENT_SCOPE)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  set(Torch_MINOR ${minor} PARENT_SCOPE)

  set(cuda OFF)
  if(NOT T_CUDA STREQUAL "OFF" AND EXISTS ${root}/lib/libtorch_cuda.so)
    set(cuda ON)
  endif()
  set(TESSERA_HAS_CUDA ${cuda} PARENT_SCOPE)
endfunction()

function(tessera_torch_target problem)
  set(${problem} "" PARENT_SCOPE)
  if(TARGET Tessera::torch)
    return()
  endif()
  if(TARGET torch)
    get_target_property(folders torch INTERFACE_INCLUDE_DIRECTORIES)
    tessera_torch_version(version ${folders})
    if(version AND NOT version MATCHES "^${Torch_MINOR}\\.")
      list(JOIN folders ", " folders)
      set(${problem} "found the target torch of ${version} (${folders})" PARENT_SCOPE)
      return()
    endif()
    add_library(Tessera::torch INTERFACE IMPORTED GLOBAL)
    set_target_properties(Tessera::torch PROPERTIES INTERFACE_LINK_LIBRARIES torch)
    return()
  endif()
  set(root ${TORCH_INSTALL_PREFIX})
  set(libraries ${root}/lib/libtorch.so ${root}/lib/libtorch_cpu.so)
  set(found_by_name ${root}/lib/libc10.so)
  if(TESSERA_HAS_CUDA)
    list(APPEND libraries ${root}/lib/libtorch_cuda.so)
    list(APPEND found_by_name ${root}/lib/libc10_cuda.so)
  endif()
  # Its libraries register their operators when they are loaded: asked for or not. An item that begins with an option is
  # no path to CMake, which would quote it.
  list(TRANSFORM libraries REPLACE "(.+)" "\"\\1\"")
  list(JOIN libraries " " libraries)
  add_library(Tessera::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(Tessera::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_LINK_LIBRARIES "-Wl,--no-as-needed ${libraries} -Wl,--as-needed;${found_by_name}")
endfunction()
