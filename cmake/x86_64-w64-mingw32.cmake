# A CMake toolchain: the core for 64-bit Windows by clang with MinGW-w64's headers and libraries, its programs executed by
# Wine. Not by GCC: on Windows it aligns the stack to 16 bytes, but stores vectors of 32 and 64 there as if it were aligned
# to these (GCC bug 54412).
#
#   cmake -S . -B build/windows -G Ninja -DCMAKE_TOOLCHAIN_FILE=cmake/x86_64-w64-mingw32.cmake
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(triple x86_64-w64-mingw32)
set(CMAKE_C_COMPILER clang-22)
set(CMAKE_CXX_COMPILER clang++-22)
set(CMAKE_C_COMPILER_TARGET ${triple})
set(CMAKE_CXX_COMPILER_TARGET ${triple})
set(CMAKE_RC_COMPILER ${triple}-windres)
# The compiler's libraries inside, and that of threads, which those need: the DLL and programs need only what Windows has.
# Not by GNU ld, which warns of inline functions that two compilers have compiled.
foreach(kind EXE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-static -lpthread -fuse-ld=lld")
endforeach()
find_program(FLASH_ATTN_WINE NAMES wine64 PATHS /usr/lib/wine)
if(FLASH_ATTN_WINE)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${FLASH_ATTN_WINE})
endif()
# The machine's own libraries are for another system.
list(APPEND CMAKE_FIND_ROOT_PATH /usr/${triple})
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
