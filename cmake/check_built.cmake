# cmake --install runs this before its other rules and in their scope: it refuses an installation
# that would end half-way. Gets `archive` and `program`, where this build makes them, and `build`,
# its folder.
cmake_policy(VERSION 3.25)
set(lacking)
set(targets)
if(NOT EXISTS "${archive}" AND NOT CMAKE_INSTALL_COMPONENT MATCHES "^(program|package|python)$")
  list(APPEND lacking "${archive}")
  list(APPEND targets library)
endif()
if(NOT EXISTS "${program}" AND NOT CMAKE_INSTALL_COMPONENT MATCHES "^(library|python)$")
  list(APPEND lacking "${program}")
  list(APPEND targets tessera)
endif()
list(JOIN lacking " and no " lacking)
list(JOIN targets " " targets)
if(targets STREQUAL "tessera" AND NOT CMAKE_INSTALL_COMPONENT)
  # Linking the library needs no program.
  message(STATUS "Installs the library alone: found no ${program}, which `cmake --build ${build} --target tessera` builds")
  set(CMAKE_INSTALL_COMPONENT library)
elseif(targets)
  message(FATAL_ERROR "Nothing is installed: found no ${lacking}, expected what is installed to be built; do "
    "`cmake --build ${build} --target ${targets}` first, or both at once by `scripts/bootstrap --install "
    "${CMAKE_INSTALL_PREFIX}`")
endif()
