# Build accelerators and the compile flags of our own targets.
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()

find_program(TESSERA_MOLD mold)
if(TESSERA_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

add_library(tessera_flags INTERFACE)
target_compile_options(tessera_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion)
# Messages name files without this machine's folders, so that packages of two builds are alike. The later of two maps
# that fit counts. ccache knows the option, and finds what another working copy has compiled.
target_compile_options(tessera_flags INTERFACE
  "-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=" "-ffile-prefix-map=${CMAKE_BINARY_DIR}/=")
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 13 of Ubuntu 24.04 sees array bounds and dangling references inside torch's and the standard library's
  # headers that are none: what no test of ours compiles with must not stop a build.
  target_compile_options(tessera_flags INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # From -O2 on, g++ 12 sees faults inside std::string (GCC bug 105651) and torch's SmallVector that are not
  # there; fixed in 13, and clang checks the same code.
  target_compile_options(tessera_flags INTERFACE
    "$<$<CONFIG:Release>:-Wno-restrict;-Wno-stringop-overread;-Wno-maybe-uninitialized>")
  if(TESSERA_SANITIZE)
    target_compile_options(tessera_flags INTERFACE -Wno-maybe-uninitialized)  # the same, at -O1
  endif()
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(tessera_flags INTERFACE -Wthread-safety)  # base/mutex.h
endif()
if(TESSERA_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Sources of a unity build are included, so g++ takes their own types for those of a header. The presets
  # dev and tidy compile each source alone, and there headers are still checked.
  target_compile_options(tessera_flags INTERFACE -Wno-subobject-linkage)
endif()
if(TESSERA_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # ccache can reuse objects next to a precompiled header only when the header carries no time stamp.
  target_compile_options(tessera_flags INTERFACE -fpch-preprocess)
endif()
if(NOT CMAKE_BUILD_TYPE STREQUAL "Release")
  # As libtorch is built, and we in Release: without it its headers lay out RecordFunction and others otherwise.
  target_compile_definitions(tessera_flags INTERFACE NDEBUG)
endif()
# Ours alone: libtorch stays as it is, and what the sanitizers say of it is in tests/sanitizers.
if(TESSERA_SANITIZE STREQUAL "address")
  target_compile_options(tessera_flags INTERFACE
    -fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  target_link_options(tessera_flags INTERFACE -fsanitize=address,undefined)
elseif(TESSERA_SANITIZE STREQUAL "thread")
  # g++ warns of a fence in libtorch's headers (PyObjectSlot.h), which the sanitizer does not follow.
  target_compile_options(tessera_flags INTERFACE
    -fsanitize=thread -fno-omit-frame-pointer $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  target_link_options(tessera_flags INTERFACE -fsanitize=thread)
elseif(TESSERA_SANITIZE)
  message(FATAL_ERROR "TESSERA_SANITIZE: found ${TESSERA_SANITIZE}, expected OFF, address or thread")
endif()
if(TESSERA_FUZZ)
  target_compile_options(tessera_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
