// What this machine is. Looked up once per process.
#ifndef STROBE_CORE_MACHINE_H_
#define STROBE_CORE_MACHINE_H_

namespace strobe {

struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C, BMI1/2
  bool avx512 = false;  // F, BW, CD, DQ, VL
  bool avx512_bf16 = false;  // avx512, and products of bf16 pairs
  bool amx = false;  // AMX tiles and bf16, AVX-512 bf16, and the kernel's leave to use them
  bool amd = false;  // made by AMD, whose cores have habits of their own (cpu/decode.h)
  bool neon = false;
  char name[64] = {};
};

const CpuFeatures& cpu_features();

}  // namespace strobe

#endif  // STROBE_CORE_MACHINE_H_
