# cmake --install: the headers, one archive libtessera.a, the files of find_package(Tessera); the
# program (lib/tessera, with a link in bin/), configs/ and tools/ (share/tessera); licences.
# Components: `library` and `program`; without --component both. The target `library` builds the archive, `tessera` the program.
#
# The archive holds the floors that the public headers stand on. It is made of their objects, so
# that what they use inside (JSON, logging: header-only) is no requirement of those who link it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(tessera_library STATIC)
add_library(Tessera::tessera ALIAS tessera_library)
foreach(floor base layout kernels dry launch comm nccl io grad parallel fsdp capture checkpoint pipeline)
  foreach(half tessera_${floor}_pure tessera_${floor})
    if(TARGET ${half})
      target_sources(tessera_library PRIVATE $<TARGET_OBJECTS:${half}>)
    endif()
  endforeach()
endforeach()
get_property(isas GLOBAL PROPERTY TESSERA_KERNEL_ISAS)
foreach(isa ${isas})
  target_sources(tessera_library PRIVATE $<TARGET_OBJECTS:tessera_kernels_${isa}>)
endforeach()
set_target_properties(tessera_library PROPERTIES
  OUTPUT_NAME tessera EXPORT_NAME tessera LINKER_LANGUAGE CXX)
target_compile_features(tessera_library INTERFACE cxx_std_20)
target_include_directories(tessera_library INTERFACE
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(tessera_library INTERFACE Tessera::torch Threads::Threads)
add_custom_target(library DEPENDS tessera_library)

# This rule comes first: cmake would notice a missing target only after it has copied the files of
# earlier rules. An installed copy without the program is complete for those who link the library.
install(CODE "set(archive \"$<TARGET_FILE:tessera_library>\")
set(program \"$<TARGET_FILE:tessera>\")
set(build \"${CMAKE_BINARY_DIR}\")" ALL_COMPONENTS)
install(SCRIPT cmake/check_built.cmake ALL_COMPONENTS)

set(tessera_cmake_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(TARGETS tessera_library EXPORT TesseraTargets COMPONENT library)
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library
  FILES_MATCHING PATTERN "*.h")
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${tessera_cmake_folder}
  COMPONENT library)
configure_package_config_file(cmake/TesseraConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake INSTALL_DESTINATION ${tessera_cmake_folder}
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake cmake/TesseraTorch.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
  DESTINATION ${tessera_cmake_folder} COMPONENT library)

# tessera_check_strip("COMPONENT;name" FOLDER files...): ends `cmake --install --strip` where strip fails, which CMake passes over.
# What is stripped already stays as it is.
function(tessera_check_strip component folder)
  foreach(file ${ARGN})
    install(CODE "if(CMAKE_INSTALL_DO_STRIP)
  set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${folder}/${file}\")
  execute_process(COMMAND \"${CMAKE_STRIP}\" \"\${file}\" RESULT_VARIABLE failed ERROR_VARIABLE said)
  if(failed)
    message(FATAL_ERROR \"\${file}: found that strip failed (\${failed}: \${said}), expected it to work; see that there is \"
      \"room on the disk, and binutils\")
  endif()
endif()" ${component})
  endforeach()
endfunction()

# The executable opens the program, next to it, with a libtorch that fits (src/loader): in an installed copy
# that of this build comes first. A package knows no folder of this machine: scripts/package installs the component
# `package` behind `program`.
set(tessera_program_folder lib/tessera)
install(TARGETS tessera tessera_program COMPONENT program
  RUNTIME DESTINATION ${tessera_program_folder} LIBRARY DESTINATION ${tessera_program_folder})
tessera_check_strip("COMPONENT;program" ${tessera_program_folder} tessera tessera_program.so)
install(FILES ${CMAKE_BINARY_DIR}/built_for.json DESTINATION ${tessera_program_folder} COMPONENT program)
# install(FILES) would take a file of the same time for the same file.
install(CODE "configure_file(\"${CMAKE_BINARY_DIR}/package/built_for.json\"
  \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${tessera_program_folder}/built_for.json\" COPYONLY)" COMPONENT package EXCLUDE_FROM_ALL)
install(CODE "set(link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/bin/tessera\")
cmake_path(GET link PARENT_PATH folder)
file(MAKE_DIRECTORY \"\${folder}\")
file(CREATE_LINK ../${tessera_program_folder}/tessera \"\${link}\" SYMBOLIC)
list(APPEND CMAKE_INSTALL_MANIFEST_FILES \"\${CMAKE_INSTALL_PREFIX}/bin/tessera\")" COMPONENT program)
install(DIRECTORY configs DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera COMPONENT program
  FILES_MATCHING PATTERN "*.toml" PATTERN "*.json")
install(DIRECTORY tools DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera COMPONENT program USE_SOURCE_PERMISSIONS
  FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)

# Ours, and those of the headers that are compiled into the library and the program.
foreach(component library program)
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/tessera COMPONENT ${component})
  foreach(package nlohmann-json3-dev libspdlog-dev libfmt-dev libxxhash-dev libgloo-dev)
    install(FILES /usr/share/doc/${package}/copyright RENAME ${package}
      DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/tessera COMPONENT ${component} OPTIONAL)
  endforeach()
endforeach()
foreach(package libcli11-dev libtomlplusplus-dev)
  install(FILES /usr/share/doc/${package}/copyright RENAME ${package}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/tessera COMPONENT program OPTIONAL)
endforeach()
