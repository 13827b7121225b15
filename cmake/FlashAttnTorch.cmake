# What the torch package in FLASH_ATTN_TORCH_DIR is, read from its files (nothing is imported):
#   flash_attn_torch_release    major.minor, such as 2.13
#   flash_attn_torch_libraries  the libraries a binding links
#   flash_attn_torch_old_abi    TRUE for wheels built with the C++ ABI from before 2011 (PyPI's, up to 2.6)

if(NOT EXISTS ${FLASH_ATTN_TORCH_DIR}/version.py OR NOT EXISTS ${FLASH_ATTN_TORCH_DIR}/include/torch)
  message(FATAL_ERROR "FLASH_ATTN_TORCH_DIR is '${FLASH_ATTN_TORCH_DIR}', which is not an installed torch package with its "
                      "headers; give what `python -c 'import torch; print(torch.__path__[0])'` prints "
                      "(Debian's headers are in libtorch-dev).")
endif()

file(STRINGS ${FLASH_ATTN_TORCH_DIR}/version.py torch_version_line REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+" flash_attn_torch_release "${torch_version_line}")
if(flash_attn_torch_release VERSION_LESS 1.13)
  message(FATAL_ERROR "The torch in ${FLASH_ATTN_TORCH_DIR} is ${flash_attn_torch_release}; 1.13 or newer is needed.")
endif()

set(flash_attn_torch_libraries)
foreach(name IN ITEMS c10 torch_cpu torch_python)
  find_library(library_${name} ${name} PATHS ${FLASH_ATTN_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
  list(APPEND flash_attn_torch_libraries ${library_${name}})
endforeach()

set(flash_attn_torch_old_abi FALSE)
set(torch_config ${FLASH_ATTN_TORCH_DIR}/share/cmake/Torch/TorchConfig.cmake)
if(EXISTS ${torch_config})
  file(STRINGS ${torch_config} old_abi_lines REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(old_abi_lines)
    set(flash_attn_torch_old_abi TRUE)
    target_compile_definitions(flash_attn_options INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
  endif()
endif()
message(STATUS "torch ${flash_attn_torch_release} in ${FLASH_ATTN_TORCH_DIR}")
