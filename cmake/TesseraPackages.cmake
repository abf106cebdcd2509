# Everything that is found rather than built. Debian package names stand in scripts/settings.sh.
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
# toml++ is taken as headers, as the others are: a package asks no library but libtorch of those who install it.
find_path(TESSERA_TOML_INCLUDE toml++/toml.h REQUIRED)
add_library(tessera_toml INTERFACE)
target_include_directories(tessera_toml SYSTEM INTERFACE ${TESSERA_TOML_INCLUDE})
target_compile_definitions(tessera_toml INTERFACE TOML_HEADER_ONLY=1)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)
# All of it in headers, fmt too, so that no library is asked of those who link ours.
add_library(tessera_spdlog INTERFACE)
target_include_directories(tessera_spdlog SYSTEM INTERFACE
  $<TARGET_PROPERTY:spdlog::spdlog_header_only,INTERFACE_INCLUDE_DIRECTORIES>)
target_compile_definitions(tessera_spdlog INTERFACE
  $<TARGET_PROPERTY:spdlog::spdlog_header_only,INTERFACE_COMPILE_DEFINITIONS>)
target_link_libraries(tessera_spdlog INTERFACE Threads::Threads fmt::fmt-header-only)

if(TESSERA_PURE_ONLY)
  return()
endif()

# libtorch: -DTorch_DIR, else TESSERA_TORCH, else CMAKE_PREFIX_PATH, else the project's .venv. Imported, so that its include
# folders are SYSTEM and our warnings do not reach into it.
include(TesseraTorch)
if(NOT Torch_DIR AND DEFINED ENV{TESSERA_TORCH})
  # Kept: what configures again later may not have the variable.
  set(Torch_DIR $ENV{TESSERA_TORCH} CACHE PATH "Folder of libtorch, or of its CMake files")
endif()
file(GLOB tessera_venv_torch ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
tessera_find_torch(CUDA ${TESSERA_CUDA} HINTS ${tessera_venv_torch})
if(NOT Torch_VERSION)
  message(FATAL_ERROR "libtorch: found none, expected its folder in TESSERA_TORCH or CMAKE_PREFIX_PATH; "
    "scripts/bootstrap installs one")
endif()
if(Torch_DIR)
  get_filename_component(asked_for ${Torch_DIR} ABSOLUTE)
  cmake_path(IS_PREFIX TORCH_INSTALL_PREFIX ${asked_for} NORMALIZE is_asked_for)
  if(NOT is_asked_for)
    message(FATAL_ERROR "Torch_DIR, or TESSERA_TORCH: found no libtorch in ${Torch_DIR} (and one in ${TORCH_INSTALL_PREFIX}), "
      "expected its folder; correct it, or leave it out")
  endif()
endif()
if(Torch_MINOR VERSION_LESS TESSERA_TORCH_OLDEST)
  message(FATAL_ERROR "libtorch: found ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX}, expected ${TESSERA_TORCH_OLDEST} to "
    "${TESSERA_TORCH_NEWEST}; choose another by TESSERA_TORCH")
elseif(Torch_MINOR VERSION_GREATER TESSERA_TORCH_NEWEST)
  message(WARNING "libtorch: found ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX}, which Tessera is not known to build with "
    "(${TESSERA_TORCH_OLDEST} to ${TESSERA_TORCH_NEWEST} are known); run ./test before you rely on what is built")
endif()
target_compile_options(tessera_flags INTERFACE "-ffile-prefix-map=${TORCH_INSTALL_PREFIX}/=torch/")
include(TesseraCuda)       # what nccl.cpp is compiled with; without it no CUDA
tessera_torch_target(problem)
if(problem)
  message(FATAL_ERROR "libtorch: ${problem}, expected ${Torch_MINOR}, as that in ${TORCH_INSTALL_PREFIX}; let both be the same")
endif()

find_path(TESSERA_GLOO_INCLUDE gloo/config.h REQUIRED)
