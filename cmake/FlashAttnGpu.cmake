# Code objects of csrc/hip/kernels: targets, the compiler of each, and the archive that the library embeds.
#
#   FLASH_ATTN_GPU_ARCHS    `;`-separated targets, `native`, or `none`; default: GPU_ARCHS or PYTORCH_ROCM_ARCH of the environment,
#                           else those of this machine's AMD GPUs, or gfx942 and gfx1201 where it has none, and NVIDIA's where torch
#                           is a CUDA build, as far as there are compilers
#   FLASH_ATTN_KERNELS_DIR  takes <target>/<name>.co or .cubin from there instead of compiling
# docs/building.md says more.

set(FLASH_ATTN_GPU_ARCHS "" CACHE STRING "GPU targets, `;`-separated; native; none; empty: from the environment, else this machine's or two")
set(FLASH_ATTN_KERNELS_DIR "" CACHE PATH "Directory of compiled code objects to embed; empty: compile them")

# csrc/hip/targets.h has the same names.
set(flash_attn_amd_targets gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1010 gfx1011 gfx1012 gfx1030 gfx1031 gfx1032 gfx1034 gfx1035
    gfx1036 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1200 gfx1201)
# Where this machine has no AMD GPU. Few, so that `pip install .` takes minutes; wheels name more.
set(flash_attn_default_targets gfx942 gfx1201)
# What is not in this list but looks like a target of ROCm's is skipped when PYTORCH_ROCM_ARCH names it, because images of torch set
# that variable to everything that torch was built for.
list(JOIN flash_attn_amd_targets "|" flash_attn_amd_pattern)
set(flash_attn_target_pattern "^(${flash_attn_amd_pattern}|sm_[89][0-9]|sm_1[0-9][0-9])$")

# Targets of the AMD GPUs of this machine; the processors that the tools list too are gfx000.
function(flash_attn_native_amd_targets result)
  set(found)
  foreach(program IN ITEMS rocm_agent_enumerator /opt/rocm/bin/rocm_agent_enumerator amdgpu-arch)
    execute_process(COMMAND ${program} OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0)
      string(REGEX MATCHALL "gfx[1-9][0-9a-f]+" names "${output}")
      list(APPEND found ${names})
      break()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Targets of the GPUs of this machine.
function(flash_attn_native_targets result)
  flash_attn_native_amd_targets(found)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE output ERROR_QUIET
                  RESULT_VARIABLE status)
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${output}")
    list(TRANSFORM capabilities REPLACE "([0-9]+)\\.([0-9])" "sm_\\1\\2")
    list(APPEND found ${capabilities})
  endif()
  list(REMOVE_DUPLICATES found)
  if(NOT found)
    message(FATAL_ERROR "GPU_ARCHS is 'native' and no GPU was found on this machine (asked rocm_agent_enumerator, amdgpu-arch and "
                        "nvidia-smi); name the targets, such as GPU_ARCHS=gfx942.")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# `targets`: what to build for; `explicit`: whether somebody asked for them, so that a missing compiler is an error.
function(flash_attn_choose_targets targets explicit)
  set(${explicit} TRUE PARENT_SCOPE)
  set(skip_unknown FALSE)
  if(NOT FLASH_ATTN_GPU_ARCHS STREQUAL "")
    set(source FLASH_ATTN_GPU_ARCHS)
    set(wanted ${FLASH_ATTN_GPU_ARCHS})
  elseif(NOT "$ENV{GPU_ARCHS}" STREQUAL "")
    set(source GPU_ARCHS)
    set(wanted $ENV{GPU_ARCHS})
  elseif(NOT "$ENV{PYTORCH_ROCM_ARCH}" STREQUAL "")
    set(source PYTORCH_ROCM_ARCH)
    set(wanted $ENV{PYTORCH_ROCM_ARCH})
    set(skip_unknown TRUE)
  else()
    set(${explicit} FALSE PARENT_SCOPE)
    flash_attn_native_amd_targets(chosen)
    list(FILTER chosen INCLUDE REGEX "${flash_attn_target_pattern}")
    if(NOT chosen)
      set(chosen ${flash_attn_default_targets})
    endif()
    if(FLASH_ATTN_TORCH_DIR)
      file(STRINGS ${FLASH_ATTN_TORCH_DIR}/version.py cuda_line REGEX "^cuda[^=]*= *['\"][0-9]")
      if(cuda_line)
        list(APPEND chosen sm_80 sm_90)
      endif()
    endif()
    set(${targets} ${chosen} PARENT_SCOPE)
    return()
  endif()
  set(chosen)
  foreach(name IN LISTS wanted)
    string(REGEX REPLACE ":.*" "" name "${name}") # gfx942:xnack- is compiled for either setting
    if(name STREQUAL "native")
      flash_attn_native_targets(native)
      list(APPEND chosen ${native})
    elseif(name MATCHES "${flash_attn_target_pattern}")
      list(APPEND chosen ${name})
    elseif(skip_unknown AND name MATCHES "^gfx[0-9a-f]+$")
      message(STATUS "GPU target ${name} (from ${source}): no kernels for it yet, skipped")
    elseif(NOT name STREQUAL "none" OR NOT wanted STREQUAL "none")
      message(FATAL_ERROR "${source} names the GPU target '${name}'; accepted are ${flash_attn_amd_targets}, sm_80 and later, native, "
                          "or none alone.")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES chosen)
  if(NOT chosen AND NOT wanted STREQUAL "none")
    message(FATAL_ERROR "There are no kernels for any GPU target of ${source}, which is '${wanted}'; accepted are "
                        "${flash_attn_amd_targets}, sm_80 and later, native, or none alone.")
  endif()
  set(${targets} ${chosen} PARENT_SCOPE)
endfunction()

set(flash_attn_hip_flags -x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -O3 -std=c++20
    # Else the code object holds a hash of its source's path.
    -fuse-cuid=none
    # Version 5 is what loaders of ROCm 5 and later read; clang's own default is newer.
    -mcode-object-version=5
    # Scores hold infinities, and NaN only if the inputs do; without IEEE mode maxima need no canonicalising instructions.
    # A comparison that has to tell NaN from infinity or 0 is one of bits: lse_to_log2 (gradient.h), OnlineSoftmax::empty.
    -fno-honor-nans -mno-amdgpu-ieee)
set(flash_attn_nvcc_flags -x cu -cubin -O3 -std=c++20 --expt-relaxed-constexpr)

# The first compiler that passes a probe compile for `target`; empty when none does.
function(flash_attn_gpu_compiler target result)
  if(DEFINED CACHE{flash_attn_compiler_${target}})
    set(${result} $CACHE{flash_attn_compiler_${target}} PARENT_SCOPE)
    return()
  endif()
  set(${result} "" PARENT_SCOPE)
  if(target MATCHES "^sm_")
    find_program(flash_attn_nvcc nvcc PATHS /usr/local/cuda/bin)
    mark_as_advanced(flash_attn_nvcc)
    if(flash_attn_nvcc)
      set(${result} ${flash_attn_nvcc} PARENT_SCOPE)
    endif()
    return()
  endif()
  set(candidates hipcc amdclang++ $ENV{ROCM_PATH}/bin/hipcc /opt/rocm/bin/hipcc /opt/rocm/llvm/bin/amdclang++)
  foreach(version RANGE 30 20 -1)
    list(APPEND candidates clang++-${version})
  endforeach()
  foreach(candidate IN LISTS candidates ITEMS clang++)
    # hipcc takes the NVIDIA path where it finds nvcc.
    execute_process(COMMAND ${CMAKE_COMMAND} -E env HIP_PLATFORM=amd ${candidate} ${flash_attn_hip_flags} --offload-arch=${target}
                            ${PROJECT_SOURCE_DIR}/cmake/gpu_probe.hip -o ${PROJECT_BINARY_DIR}/CMakeFiles/gpu_probe.co
                    RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
      set(flash_attn_compiler_${target} ${candidate} CACHE INTERNAL "Compiler for ${target}")
      set(${result} ${candidate} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Adds the rule for one code object and returns its path.
function(flash_attn_add_code_object target compiler source result)
  cmake_path(GET source STEM name)
  set(folder ${PROJECT_BINARY_DIR}/kernels/${target})
  set(includes -I${PROJECT_SOURCE_DIR}/csrc -I${PROJECT_SOURCE_DIR}/csrc/include)
  if(target MATCHES "^sm_")
    set(object ${folder}/${name}.cubin)
    set(dependencies -MD -MF ${object}.d -MT ${object})
    set(flags ${flash_attn_nvcc_flags} -arch=${target} $<$<BOOL:${FLASH_ATTN_WERROR}>:-Werror> $<$<BOOL:${FLASH_ATTN_WERROR}>:all-warnings>)
  else()
    set(object ${folder}/${name}.co)
    # clang's driver drops -MD when one command compiles and links.
    set(dependencies -Xclang -dependency-file -Xclang ${object}.d -Xclang -MT -Xclang ${object})
    set(flags ${flash_attn_hip_flags} --offload-arch=${target} -Wall -Wextra $<$<BOOL:${FLASH_ATTN_WERROR}>:-Werror>)
  endif()
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E env HIP_PLATFORM=amd ${compiler} ${flags} ${includes} ${dependencies} -o ${object} ${source}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "GPU kernels: ${name} for ${target}"
    COMMAND_EXPAND_LISTS VERBATIM)
  set(${result} ${object} PARENT_SCOPE)
endfunction()

# The code objects of this build as `target;name;file` triples; `missing` says why there are none or fewer.
function(flash_attn_code_objects triples missing)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/hip/kernels/*.hip)
  flash_attn_choose_targets(targets explicit)
  set(all)
  set(reasons)
  foreach(target IN LISTS targets)
    if(FLASH_ATTN_KERNELS_DIR)
      file(GLOB files CONFIGURE_DEPENDS ${FLASH_ATTN_KERNELS_DIR}/${target}/*.co ${FLASH_ATTN_KERNELS_DIR}/${target}/*.cubin)
      if(NOT files)
        message(FATAL_ERROR "FLASH_ATTN_KERNELS_DIR is '${FLASH_ATTN_KERNELS_DIR}', which has no ${target}/*.co or .cubin.")
      endif()
      foreach(file IN LISTS files)
        cmake_path(GET file STEM name)
        list(APPEND all ${target} ${name} ${file})
      endforeach()
      message(STATUS "GPU target ${target}: code objects of ${FLASH_ATTN_KERNELS_DIR}")
      continue()
    endif()
    flash_attn_gpu_compiler(${target} compiler)
    if(NOT compiler)
      set(reason "no compiler for ${target} (install ROCm, or clang 20 or later with lld: apt install clang-22 lld-22)")
      if(target MATCHES "^sm_")
        set(reason "no compiler for ${target} (install CUDA's nvcc)")
      endif()
      if(explicit)
        message(FATAL_ERROR "GPU kernels were asked for and there is ${reason}.")
      endif()
      list(APPEND reasons ${reason})
      message(STATUS "GPU target ${target}: ${reason}")
      continue()
    endif()
    message(STATUS "GPU target ${target}: ${compiler}")
    foreach(source IN LISTS sources)
      flash_attn_add_code_object(${target} ${compiler} ${source} object)
      cmake_path(GET source STEM name)
      list(APPEND all ${target} ${name} ${object})
    endforeach()
  endforeach()
  if(NOT targets)
    set(reasons "none were asked for")
  endif()
  list(JOIN reasons ", " text) # It becomes a compile definition, which CMake drops where it holds a semicolon.
  set(${triples} ${all} PARENT_SCOPE)
  set(${missing} "${text}" PARENT_SCOPE)
endfunction()

# Gives `library` (an object library) the code objects, compressed where zstd is there, or the reason why it has none.
function(flash_attn_embed_code_objects library)
  flash_attn_code_objects(triples missing)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(triples)
    set(missing "GPU runtimes are opened on Linux only")
  endif()
  if(NOT triples)
    target_compile_definitions(${library} PRIVATE "FLASH_ATTN_NO_CODE_OBJECTS=\"${missing}\"")
    message(STATUS "GPU kernels: none (${missing})")
    return()
  endif()
  add_executable(flash_attn_pack ${PROJECT_SOURCE_DIR}/csrc/hip/runtime/pack.cpp)
  target_include_directories(flash_attn_pack PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(flash_attn_pack PRIVATE flash_attn_options)
  find_path(flash_attn_zstd_include zstd.h)
  # The static library, so that nothing has to be installed where a wheel is used.
  find_library(flash_attn_zstd NAMES libzstd.a zstd)
  mark_as_advanced(flash_attn_zstd_include flash_attn_zstd)
  if(flash_attn_zstd_include AND flash_attn_zstd)
    foreach(user IN ITEMS ${library} flash_attn_pack)
      target_compile_definitions(${user} PRIVATE FLASH_ATTN_ZSTD)
      target_include_directories(${user} SYSTEM PRIVATE ${flash_attn_zstd_include})
    endforeach()
    target_link_libraries(${library} PUBLIC $<BUILD_INTERFACE:${flash_attn_zstd}>)
    target_link_libraries(flash_attn_pack PRIVATE ${flash_attn_zstd})
  else()
    message(STATUS "GPU kernels: stored uncompressed, because zstd's header or library is not there (apt install libzstd-dev)")
  endif()
  set(archive ${PROJECT_BINARY_DIR}/kernels/code_objects.bin)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/kernels)
  set(files)
  list(LENGTH triples length)
  math(EXPR last "${length} - 1")
  foreach(index RANGE 2 ${last} 3)
    list(GET triples ${index} file)
    list(APPEND files ${file})
  endforeach()
  add_custom_command(OUTPUT ${archive} COMMAND flash_attn_pack ${archive} ${triples} DEPENDS ${files} COMMENT "GPU kernels: packing"
                     VERBATIM)
  add_custom_target(flash_attn_kernels DEPENDS ${files})
  set(embed ${PROJECT_SOURCE_DIR}/csrc/hip/runtime/embed.S)
  set_source_files_properties(${embed} PROPERTIES OBJECT_DEPENDS ${archive}
                              COMPILE_DEFINITIONS "FLASH_ATTN_CODE_OBJECTS=\"${archive}\"")
  target_sources(${library} PRIVATE ${embed})
endfunction()
