# Which CUDA architectures to build for: what STROBE_CUDA_ARCHS = NATIVE and ALL stand for.

# strobe_cuda_archs(WANTED LIST WHY): sets LIST to some of 75, 80, 86, 89, 90, or to nothing where no GPU of this machine is one that
# Strobe's CUDA kernels run on, and WHY to the reason in words. NATIVE asks nvidia-smi, which opens no device for computing, and
# waits ten seconds at most; CMake's own `native` runs a CUDA program. Where it cannot say which GPUs there are (none, no driver, a
# container that builds for another machine), nvcc is there to build for GPUs elsewhere: all architectures.
function(strobe_cuda_archs wanted list why)
  set(all 75 80 86 89 90)
  if(wanted STREQUAL ALL)
    set(${list} ${all} PARENT_SCOPE)
    set(${why} "all architectures" PARENT_SCOPE)
    return()
  elseif(NOT wanted STREQUAL NATIVE)
    set(${list} ${wanted} PARENT_SCOPE)
    list(JOIN wanted ", " names)
    set(${why} "${names}, as was asked" PARENT_SCOPE)
    return()
  endif()

  find_program(nvidia_smi nvidia-smi NO_CACHE)
  set(answer)
  if(NOT nvidia_smi)
    set(reason "nvidia-smi was not found")
  else()
    execute_process(COMMAND "${nvidia_smi}" --query-gpu=compute_cap,name --format=csv,noheader
      OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE status TIMEOUT 10)
    set(reason "nvidia-smi did not say which GPUs there are (${status})")
    if(NOT status EQUAL 0)
      set(answer)
    endif()
  endif()

  string(REGEX MATCHALL "[0-9]+\\.[0-9]+, [^\r\n]+" gpus "${answer}")
  list(REMOVE_DUPLICATES gpus)
  if(NOT gpus)
    set(${list} ${all} PARENT_SCOPE)
    set(${why} "all architectures, since ${reason}" PARENT_SCOPE)
    return()
  endif()
  set(found)
  set(names)
  foreach(gpu IN LISTS gpus)
    string(REGEX MATCH "^([0-9]+)\\.([0-9]+), (.*)$" ignored "${gpu}")
    list(APPEND names "${CMAKE_MATCH_3} (${CMAKE_MATCH_1}.${CMAKE_MATCH_2})")
    set(arch ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    if(arch IN_LIST all)
      list(APPEND found ${arch})
    elseif(CMAKE_MATCH_1 GREATER_EQUAL 8)
      list(APPEND found 80)  # machine code of 8.0 runs on 8.7, PTX of 8.0 on all that is newer
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  list(SORT found)
  list(JOIN names ", " names)
  set(${list} "${found}" PARENT_SCOPE)  # quoted, as an empty value without quotes would unset it
  set(${why} "this machine's ${names}" PARENT_SCOPE)
endfunction()
