// Which architecture's instructions a kernel is made of: those of the one that it is compiled for;
// but in the build for racecheck 7.5's kernels are compiled for 8.0, so that their barriers can be
// mbarriers, and keep 7.5's instructions in all else.
#ifndef STROBE_CUDA_PTX_INSTRUCTIONS_H_
#define STROBE_CUDA_PTX_INSTRUCTIONS_H_

#ifndef STROBE_CUDA_INSTRUCTIONS
#define STROBE_CUDA_INSTRUCTIONS __CUDA_ARCH__
#endif

#endif  // STROBE_CUDA_PTX_INSTRUCTIONS_H_
