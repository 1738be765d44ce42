# What a build by pip says before it compiles: what it will build, how long that takes, and how to have it otherwise.
#
# pip shows nothing of a build without -v. So the text goes to the terminal too, where the process has one: that is the way by which
# programs ask for a password while their output is elsewhere. Nothing is written in CI, in a container without a terminal, or with
# --config-settings=cmake.define.STROBE_ANNOUNCE=OFF.
option(STROBE_ANNOUNCE "A build by pip says on the terminal what it builds and how long that takes" ON)

# strobe_minutes(OUT LEAST MOST): minutes of processor time (LEAST 0: at most) as minutes on this machine's cores. On AMD EPYCs all
# CUDA kernels took 18 (Zen 4) to 36 (Zen 3), the CPU's 2 to 6.
function(strobe_minutes out least most)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  math(EXPR least "(${least} + ${cores} - 1) / ${cores}")
  math(EXPR most "(${most} + ${cores} - 1) / ${cores}")
  set(text "${least} to ${most} minutes")
  if(least EQUAL 0)
    set(text "at most ${most} minutes")
  elseif(least EQUAL most)
    set(text "${most} minutes")
  endif()
  if(most EQUAL 1)
    set(text "a minute or two")  # the longest file takes that
  endif()
  set(${out} "${text} on ${cores} cores" PARENT_SCOPE)
endfunction()

set(switch "pip install --config-settings=cmake.define")
if(TARGET strobe_cuda_objects)
  strobe_minutes(time 18 36)
  set(other "For one architecture, in less time: ${switch}.STROBE_CUDA_ARCHS=90 .")
  if(NOT STROBE_CUDA_ARCHS_WHY MATCHES "^all architectures")
    strobe_minutes(time 0 36)
    set(other "For all architectures: ${switch}.STROBE_CUDA_ARCHS=ALL .")
  endif()
  set(announcement
    "strobe: building for the CPU, and CUDA kernels for ${STROBE_CUDA_ARCHS_WHY}. This takes ${time}."
    "  ${other}"
    "  For the CPU alone, in less time: ${switch}.STROBE_CUDA=OFF .")
else()
  strobe_minutes(time 2 6)
  set(announcement
    "strobe: building for the CPU alone, since ${STROBE_NO_CUDA_REASON}. This takes ${time}."
    "  With CUDA kernels: put nvcc (12.4 or newer) on the PATH, and ${switch}.STROBE_CUDA=ON ."
    "  Or make a wheel that has them: make wheel (docs/releasing.md).")
endif()
list(JOIN announcement "\n" announcement)
message(NOTICE "${announcement}")
if(STROBE_ANNOUNCE AND NOT STROBE_MANYLINUX)
  # A terminal that does not take it (another job has it and `stty tostop` is set) is left alone after two seconds.
  execute_process(COMMAND sh -c "printf '\\n%s\\n' \"$1\" >/dev/tty" sh "${announcement}"
    TIMEOUT 2 OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE ignored)
endif()
