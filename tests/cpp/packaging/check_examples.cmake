# Builds and runs examples/ against an installed copy of the build, and nothing else of it.
set(prefix ${WORK_DIR}/examples_prefix)
set(build ${WORK_DIR}/examples)
file(REMOVE_RECURSE ${prefix} ${build})

execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
execute_process(COMMAND ${CMAKE_COMMAND} -S ${EXAMPLES_DIR} -B ${build} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
                        -DCMAKE_PREFIX_PATH=${prefix} "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror"
                        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror" COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
foreach(program IN ITEMS attention_c cache_c decode_cpp)
  execute_process(COMMAND ${build}/${program} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
