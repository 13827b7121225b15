# Builds examples/rust against an installed copy of the build, warnings as errors; runs its tests, which compare its
# declarations with the installed header, and its programs. Skipped, with the reason, where the tools for it are not there.
foreach(tool IN ITEMS cargo rustc pkg-config)
  find_program(${tool} ${tool})
  if(NOT ${tool})
    message("skipped: no ${tool} on this machine, so examples/rust was not built")
    return()
  endif()
endforeach()
foreach(tool IN ITEMS cargo rustc) # rustup's stand-ins are there without a toolchain, too
  execute_process(COMMAND ${${tool}} --version RESULT_VARIABLE result OUTPUT_VARIABLE version ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message("skipped: ${${tool}} does not run, so examples/rust was not built: ${error}")
    return()
  endif()
endforeach()
string(REGEX MATCH "[0-9]+[0-9.]*" version "${version}")
if(version VERSION_LESS 1.63)
  message("skipped: rustc is ${version}, and examples/rust needs 1.63, so it was not built")
  return()
endif()

set(prefix "${WORK_DIR}/rust prefix, installed") # build.rs takes any name
set(target ${WORK_DIR}/rust_target)
file(REMOVE_RECURSE ${prefix} ${target})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(GLOB_RECURSE pc_file ${prefix}/flash_attn.pc)
get_filename_component(pc_dir ${pc_file} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
set(ENV{RUSTFLAGS} "$ENV{RUSTFLAGS} -D warnings")
if(NOT DEFINED ENV{CARGO_HOME})
  set(ENV{CARGO_HOME} ${WORK_DIR}/cargo_home) # cargo would leave its lock in the user's
endif()
set(options --quiet --offline --locked --manifest-path ${EXAMPLES_DIR}/rust/Cargo.toml --target-dir ${target})

execute_process(COMMAND ${cargo} test ${options} COMMAND_ERROR_IS_FATAL ANY)
foreach(program IN ITEMS attention cache)
  execute_process(COMMAND ${cargo} build ${options} --bin ${program} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${target}/debug/${program} COMMAND_ERROR_IS_FATAL ANY) # finds the library by itself
endforeach()

set(ENV{PKG_CONFIG_PATH} ${WORK_DIR}/nowhere)
set(ENV{PKG_CONFIG_LIBDIR} ${WORK_DIR}/nowhere)
execute_process(COMMAND ${cargo} build ${options} RESULT_VARIABLE result ERROR_VARIABLE error)
if(result EQUAL 0 OR NOT error MATCHES "flash_attn is not found.*PKG_CONFIG_PATH=<prefix>")
  message(FATAL_ERROR "without flash_attn, cargo should say what to do; it left with ${result} and said:\n${error}")
endif()
