# Everything that is found rather than built. Debian package names stand in scripts/bootstrap.
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(tomlplusplus QUIET)
if(NOT tomlplusplus_FOUND)
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(tomlplusplus REQUIRED IMPORTED_TARGET tomlplusplus)
  add_library(tomlplusplus::tomlplusplus ALIAS PkgConfig::tomlplusplus)
endif()
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

# libtorch: -DTorch_DIR / CMAKE_PREFIX_PATH, else TESSERA_TORCH, else the project's .venv.
if(NOT CMAKE_PREFIX_PATH)
  if(DEFINED ENV{TESSERA_TORCH})
    list(APPEND CMAKE_PREFIX_PATH $ENV{TESSERA_TORCH})
  else()
    file(GLOB tessera_venv_torch ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
    list(APPEND CMAKE_PREFIX_PATH ${tessera_venv_torch})
  endif()
endif()
find_package(Torch REQUIRED)
# Compile flags of Torch (the C++ ABI switch) come with its imported target; its include folders are
# SYSTEM there already, so that our warnings do not reach into it.

find_path(TESSERA_GLOO_INCLUDE gloo/config.h REQUIRED)
