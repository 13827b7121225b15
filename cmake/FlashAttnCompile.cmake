# Compile options of every target of this project: build type, warnings, sanitizers, C++ ABI, and the flags of each instruction set.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

add_library(flash_attn_options INTERFACE)
target_compile_features(flash_attn_options INTERFACE cxx_std_20)
if(MSVC)
  target_compile_options(flash_attn_options INTERFACE /W4 $<$<BOOL:${FLASH_ATTN_WERROR}>:/WX>)
else()
  target_compile_options(flash_attn_options INTERFACE -Wall -Wextra $<$<BOOL:${FLASH_ATTN_WERROR}>:-Werror>)
endif()

if(NOT MSVC)
  # Error messages (torch's checks) hold __FILE__: paths of the machine have no place in a binary, which should also be
  # the same bytes wherever it was built.
  target_compile_options(flash_attn_options INTERFACE -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
  # After it, since the last one that fits counts: torch may lie in this tree.
  if(FLASH_ATTN_TORCH_DIR)
    target_compile_options(flash_attn_options INTERFACE -ffile-prefix-map=${FLASH_ATTN_TORCH_DIR}/=torch/)
  endif()
endif()

# Beside flash_attn_options, for what a sanitizer build instruments.
add_library(flash_attn_sanitizers INTERFACE)
if(FLASH_ATTN_SANITIZE)
  if(NOT FLASH_ATTN_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "FLASH_ATTN_SANITIZE is '${FLASH_ATTN_SANITIZE}'; accepted are address, undefined, "
                        "address,undefined and thread.")
  endif()
  if(FLASH_ATTN_TORCH_DIR)
    message(FATAL_ERROR "FLASH_ATTN_SANITIZE is for the core and its tests; leave FLASH_ATTN_TORCH_DIR unset.")
  endif()
  set(sanitizer_flags -fsanitize=${FLASH_ATTN_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if(FLASH_ATTN_SANITIZE MATCHES "address")
    # What AddressSanitizer sees, seen once more; it nearly doubles what GCC 12 takes to compile AVX2's kernels.
    list(APPEND sanitizer_flags -fno-sanitize=object-size)
  endif()
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    # Assertions stay on; -O1 keeps the SIMD templates fast enough to be tested. Reports need lines, not variables, whose
    # places take GCC 12 a sixth of its time.
    list(APPEND sanitizer_flags -O1 -g1 -UNDEBUG)
  endif()
  target_compile_options(flash_attn_sanitizers INTERFACE ${sanitizer_flags})
  target_link_options(flash_attn_sanitizers INTERFACE ${sanitizer_flags})
endif()

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# The instruction set of a file is the last part of its name, with an optional topic after it: isa_avx2.cpp,
# isa_avx512_bf16.cpp, isa_amx_bf16_fp16.cpp, rotary_avx512.cpp.
set(FLASH_ATTN_ISA_PATTERN "_(portable|amx_bf16|avx512_bf16|avx512|avx2|neon_bf16|neon)(_[a-z0-9_]+)?\\.cpp$")

set(flash_attn_is_x86 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(flash_attn_is_x86 TRUE)
endif()
set(flash_attn_is_arm64 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND NOT MSVC)
  set(flash_attn_is_arm64 TRUE)
endif()

if(MSVC)
  set(flash_attn_flags_avx2 /arch:AVX2)
  set(flash_attn_flags_avx512 /arch:AVX512)
  set(flash_attn_flags_avx512_bf16 /arch:AVX512)
  set(flash_attn_flags_amx_bf16 /arch:AVX512)
else()
  set(flash_attn_flags_avx2 -mavx2 -mfma -mf16c)
  set(flash_attn_flags_avx512 ${flash_attn_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12's own AVX-512 header reads an uninitialised variable on purpose (GCC bug 105593).
    list(APPEND flash_attn_flags_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set(flash_attn_flags_avx512_bf16 ${flash_attn_flags_avx512} -mavx512bf16)
  set(flash_attn_flags_amx_bf16 ${flash_attn_flags_avx512_bf16} -mamx-tile -mamx-bf16)
endif()
set(flash_attn_flags_portable "")
set(flash_attn_flags_neon "") # every AArch64 processor has it
set(flash_attn_flags_neon_bf16 -march=armv8.2-a+bf16)

foreach(isa IN LISTS FLASH_ATTN_NOT_SANITIZED)
  if(NOT DEFINED flash_attn_flags_${isa})
    message(FATAL_ERROR "FLASH_ATTN_NOT_SANITIZED names '${isa}'; accepted are portable, avx2, avx512, avx512_bf16, "
                        "amx_bf16, neon and neon_bf16.")
  endif()
endforeach()

# Gives the files in the list `sources_var` the flags of their instruction set, removes those of sets that the target
# processor does not have, and sorts the rest from the least set to the greatest. The order matters: of an inline function
# or template that several files define the linker keeps the first, which so is one that every caller may execute.
function(flash_attn_apply_isa_flags sources_var)
  foreach(source IN LISTS ${sources_var})
    set(isa none)
    if(source MATCHES "${FLASH_ATTN_ISA_PATTERN}")
      set(isa ${CMAKE_MATCH_1})
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${flash_attn_flags_${isa}})
    endif()
    list(APPEND of_${isa} ${source})
  endforeach()
  set(sorted ${of_none} ${of_portable})
  if(flash_attn_is_x86)
    list(APPEND sorted ${of_avx2} ${of_avx512} ${of_avx512_bf16} ${of_amx_bf16})
  endif()
  if(flash_attn_is_arm64)
    list(APPEND sorted ${of_neon} ${of_neon_bf16})
  endif()
  set(${sources_var} ${sorted} PARENT_SCOPE)
endfunction()

# Moves the files of FLASH_ATTN_NOT_SANITIZED's instruction sets from one list to another, if anything is instrumented.
function(flash_attn_take_not_sanitized sources_var taken_var)
  set(kept)
  set(taken)
  foreach(source IN LISTS ${sources_var})
    if(FLASH_ATTN_SANITIZE AND source MATCHES "${FLASH_ATTN_ISA_PATTERN}" AND CMAKE_MATCH_1 IN_LIST FLASH_ATTN_NOT_SANITIZED)
      list(APPEND taken ${source})
    else()
      list(APPEND kept ${source})
    endif()
  endforeach()
  set(${sources_var} ${kept} PARENT_SCOPE)
  set(${taken_var} ${taken} PARENT_SCOPE)
endfunction()
