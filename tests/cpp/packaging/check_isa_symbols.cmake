# Looks at the functions that several objects define (inline functions, templates), of which the linker keeps the first.
#   - It must be the one for the least instruction set, or a machine without the greater one executes it.
#   - A function of this project should not be there at all when the objects are for different sets: the greater set would
#     run the lesser's code, slower than it was written to be.
#
#   cmake -DNM=nm -DOBJECTS=a.o,b.o (in link order) -DISA_PATTERN=<regex> -P check_isa_symbols.cmake
set(rank_portable 0)
set(rank_avx2 1)
set(rank_avx512 2)
set(rank_avx512_bf16 3)
set(rank_amx_bf16 4)

string(REPLACE "," ";" OBJECTS "${OBJECTS}")
set(offenders)
foreach(object IN LISTS OBJECTS)
  string(REGEX REPLACE "\\.(o|obj)$" "" source ${object})
  set(rank 0)
  if(source MATCHES "${ISA_PATTERN}")
    set(rank ${rank_${CMAKE_MATCH_1}})
  endif()
  execute_process(COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL " W [^\n]+" symbols "${symbols}")
  foreach(line IN LISTS symbols)
    string(SUBSTRING ${line} 3 -1 symbol)
    if(NOT DEFINED rank_of_${symbol})
      set(rank_of_${symbol} ${rank})
      set(object_of_${symbol} ${object})
    elseif(rank LESS rank_of_${symbol} OR (rank GREATER rank_of_${symbol} AND symbol MATCHES "10flash_attn"))
      list(APPEND offenders "${symbol}\n    in ${object_of_${symbol}}\n   and ${object}")
    endif()
  endforeach()
endforeach()
if(offenders)
  list(JOIN offenders "\n  " text)
  message(FATAL_ERROR "Functions compiled for several instruction sets, of which the linker keeps one:\n  ${text}\n"
                      "Make the set a template parameter, use an unnamed namespace, or force inlining.")
endif()
list(LENGTH OBJECTS count)
message("${count} objects checked")
