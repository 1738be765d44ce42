#!/usr/bin/env python3
"""Compiles each kernel header with NVRTC, as a program with scores of its own would.

    scripts/check_nvrtc.py [--include DIR]

Twice each: as it stands, where NVRTC takes every function of the host for an error (kernel headers are device code
alone); and one kernel of it to PTX, with unmarked functions taken for the device's, which lambdas in kernels are.

DIR is the CUDA toolkit's folder of headers; without it, that beside nvcc or in /usr/local/cuda. libnvrtc: $NVRTC, the toolkit's, or PyPI's in
build/venv (nvidia-cuda-nvrtc). Where there is none it exits with 77 (skipped).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# NVRTC has no headers of the language. The toolkit's library for the device has them under other names.
STANDARD = "#include <cuda/std/{0}>\nnamespace std {{ using namespace cuda::std; }}\n"
HEADERS = {name: STANDARD.format(name) for name in ("cmath", "cstddef", "cstdint", "cstring", "type_traits")}

# One kernel of a header, by what comes after the header.
KERNELS = {
    "mma_sync/forward_sm80.cuh": """
namespace strobe::cuda::sm80 {
constexpr ForwardConfig kC{80, kBfloat16, 64, 64, 128, 64, 2, 4};
constexpr ForwardTuning kT = general_tuning(kC);
using Shape = ForwardShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps, kT.step, kT.kept, kT.split,
                           kT.min_blocks>;
__device__ auto* const kernel = &forward_kernel<Shape, true, true>;
}
""",
    "mma_sync/backward_sm80.cuh": """
namespace strobe::cuda::sm80 {
constexpr BackwardConfig kC{80, kFloat16, 64, 64, 64, 128, 2, 8};
__device__ auto* const kernel = &backward_kernel<BackwardShape<kC>, true, true, true>;
constexpr BackwardConfig kMasked{80, kBfloat16, 128, 128, 64, 64, 2, 8};
__device__ auto* const masked = &backward_kernel<BackwardShape<kMasked, true>, true, true, true>;
}
""",
    "backward/dbias.cuh": """
#include "cuda/mma_sync/dbias_form.cuh"
namespace strobe::cuda {
__device__ auto* const kernel = &dbias_kernel<__nv_bfloat16, sm80::DbiasForm, MaskedStageTraits>;
}
""",
    "decode/decode.cuh": """
namespace strobe::cuda {
__device__ auto* const kernel = &decode_kernel<DecodeShape<kBfloat16, 64, 16, 32, 3, 4>, true, true, CachedUpdateParams>;
__device__ auto* const codes = &decode_kernel<DecodeShape<kFloat16, 128, 16, 32, 3, 8, kE4m3Codes>, true, true, QuantisedParams>;
__device__ auto* const blocks = &decode_kernel<DecodeShape<kBfloat16, 128, 16, 32, 6, 8, kQ4Blocks>, true, true, QuantisedParams>;
}
""",
    "cache/update_kernel.cuh": """
#include "cuda/decode/layout.h"
namespace strobe::cuda {
__device__ auto* const kernel = &update_kernel<DecodeShape<kBfloat16, 256, 16, 16, 2, 2>, true>;
}
""",
    "hopper/forward_sm90.cuh": """
namespace strobe::cuda::sm90 {
constexpr ForwardConfig kC{90, kBfloat16, 64, 64, 128, 128, 4, 8};
constexpr Features kGeneral = features::kInvariantRows | features::kScores;
__device__ auto* const kernel = &forward_kernel<TraitsOf<kC, kGeneral>, true, false, ForwardParams>;
__device__ auto* const cached = &forward_kernel<TraitsOf<kC, kGeneral>, true, false, TileParams>;
__device__ auto* const invariant = &forward_kernel<TraitsOf<kC, features::kInvariantRows>, false, false, TileParams>;
__device__ auto* const merge = &merge_chunks_kernel<TraitsOf<kC, features::kInvariantRows>, ForwardParams>;
constexpr ForwardConfig kFloat8{90, kE4m3Codes, 128, 128, 128, 128, 2, 8};
constexpr ForwardConfig kBiased{90, kFloat16, 128, 128, 128, 128, 2, 8};
__device__ auto* const bias = &forward_kernel<TraitsOf<kBiased, features::kBias>, false, false, ForwardParams>;
__device__ auto* const float8 = &forward_kernel<TraitsOf<kFloat8, features::kNothing>, false, false, ForwardParams>;
}
""",
    "hopper/backward_sm90.cuh": """
namespace strobe::cuda::sm90 {
constexpr BackwardConfig kC{90, kBfloat16, 128, 128, 64, 128, 2, 8};
__device__ auto* const kernel = &backward_kernel<BackwardTraitsOf<kC>>;
__device__ auto* const ordered = &backward_kernel<BackwardTraitsOf<kC, true>>;
__device__ auto* const general = &backward_kernel<BackwardTraitsOf<kC, false, true>>;
}
""",
    "hopper/backward_sm90_wide.cuh": """
namespace strobe::cuda::sm90_wide {
__device__ auto* const kernel = &backward_kernel<WideTraits<kBfloat16, 256, 256, false, false>>;
__device__ auto* const general = &backward_kernel<WideTraits<kBfloat16, 256, 256, true, true>>;
}
""",
}


def find_headers() -> Path | None:
    folders = [Path(nvcc).resolve().parents[1] / "include"] if (nvcc := shutil.which("nvcc")) else []
    folders += [p / "include" for p in sorted(Path("/usr/local").glob("cuda*"))]
    return next((p for p in folders if (p / "cuda_bf16.h").exists()), None)


def find_nvrtc(include: Path) -> Path | None:
    toolkit = include.parent
    folders = [toolkit / "lib64", toolkit / "lib", *sorted(Path("/usr/local").glob("cuda*/lib64"))]
    folders += (ROOT / "build/venv/lib").glob("python*/site-packages/nvidia/cu*/lib")
    found = [lib for folder in folders for lib in sorted(folder.glob("libnvrtc.so.*"))]
    return next((Path(p) for p in (os.environ.get("NVRTC"), *found) if p), None)


class Nvrtc:
    def __init__(self, library: Path) -> None:
        # It looks for this one by name alone.
        for part in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        # Nobody runs what comes out, and templates are instantiated all the same.
        self.in_haste = ["--fdevice-syntax-only"] if major.value >= 13 else []

    def compile(self, source: str, options: list[str]) -> str:
        """Empty, or what was wrong."""
        program = ctypes.c_void_p()

        def strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
            return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

        call = self.library.nvrtcCreateProgram
        headers = (len(HEADERS), strings(list(HEADERS.values())), strings(list(HEADERS)))
        if error := call(ctypes.byref(program), source.encode(), b"kernel.cu", *headers):
            return f"nvrtcCreateProgram: error {error}"
        error = self.library.nvrtcCompileProgram(program, len(options), strings(options))
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return (log.value.decode() or f"nvrtcCompileProgram: error {error}") if error else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles each kernel header with NVRTC.")
    parser.add_argument("--include", type=Path, help="the CUDA toolkit's folder of headers")
    include = parser.parse_args().include or find_headers()
    if not include:
        print("check_nvrtc: skipped: no headers of CUDA beside nvcc or in /usr/local/cuda; --include says where they are")
        return 77
    library = find_nvrtc(include)
    if not library:
        print("check_nvrtc: skipped: no libnvrtc in the toolkit or in build/venv (pip install nvidia-cuda-nvrtc)")
        return 77
    nvrtc = Nvrtc(library)
    source = ROOT / "src/cuda"
    launches = sorted([*source.glob("mma_sync/*_launch.h"), *source.glob("hopper/*_launch.h")])
    kernels = [Path(str(p).replace("_launch.h", ".cuh")) for p in launches]  # but for what launches share
    headers = sorted({str(p.relative_to(source)) for p in kernels if p.exists()} | set(KERNELS))
    failed = 0
    for header in headers:
        arch = "90a" if "_sm90" in header else "80"
        options = ["--std=c++20", f"--gpu-architecture=compute_{arch}", f"-I{ROOT / 'src'}"]
        options += [f"-I{include}", f"-I{include / 'cccl'}"]
        text = f'#include "cuda/{header}"\n'
        log = nvrtc.compile(text, options)
        if not log and header not in KERNELS:
            log = "scripts/check_nvrtc.py has no kernel of it: add one to KERNELS"
        if not log:
            log = nvrtc.compile(text + KERNELS[header], [*options, *nvrtc.in_haste, "-default-device", "-diag-suppress=177"])
        if log:
            failed += 1
            print(f"{header}: {log[:4000]}")
    print(f"check_nvrtc: {len(headers)} kernel headers, " + (f"{failed} do not compile" if failed else "all compile"))
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
