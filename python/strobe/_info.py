"""What the library is, and what it found on this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass

import numpy as np

from . import _core, _library


@dataclass(frozen=True)
class Kernel:
    """A row of the kernel table.

    Example:
        >>> import strobe
        >>> strobe.Kernel("cpu_avx512", unavailable="this CPU has no AVX-512").name
        'cpu_avx512'
    """

    name: str
    unavailable: str  # why it cannot run on this machine; "" when it can


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device.

    Example:
        >>> import strobe
        >>> for device in strobe.info().cuda_devices:
        ...     assert device.compute_capability >= 50
    """

    name: str
    compute_capability: int  # 90 for 9.0
    multiprocessors: int
    memory_bytes: int


@dataclass(frozen=True)
class Info:
    """Versions, devices and kernels. str() of it is what `python -m strobe` prints.

    Example:
        >>> import strobe
        >>> found = strobe.info()
        >>> found.version == strobe.__version__, found.cpu_threads >= 1
        (True, True)
    """

    version: str
    library: str  # path of the shared library in use
    compiler: str  # that built it
    python: str
    numpy: str
    torch: str  # PyTorch's version, without importing it; "" when it is not installed
    cpu: str
    cpu_isa: str  # widest instruction set in use
    cpu_isas: tuple[str, ...]  # all that are here, widest first: STROBE_CPU_ISA limits them
    cpu_threads: int
    cuda_devices: tuple[CudaDevice, ...]
    cuda_reason: str  # why there are none; "" when there are
    tuning: str  # which file of choices is in force, or "none", and why
    kernels: tuple[Kernel, ...]  # in the order in which a plan asks them

    def __str__(self) -> str:
        isas = f"of {', '.join(self.cpu_isas)}; STROBE_CPU_ISA limits them"
        rows = [
            ("strobe", self.version),
            ("library", self.library),
            ("compiler", self.compiler),
            ("python", f"{self.python}, numpy {self.numpy}"),
            ("pytorch", self.torch or "none: strobe.flash_attn and strobe.torch need 2.4 or newer"),
            ("cpu", f"{self.cpu or 'unknown'}, {self.cpu_threads} threads"),
            ("cpu isa", f"{self.cpu_isa} ({isas})"),
        ]
        for index, device in enumerate(self.cuda_devices):
            major, minor = divmod(device.compute_capability, 10)
            gigabytes = device.memory_bytes / 1e9
            memory = f"{gigabytes:.{1 if gigabytes < 99.95 else 0}f} GB"
            cores = f"{device.multiprocessors} multiprocessors"
            value = f"{device.name}, compute capability {major}.{minor}, {cores}, {memory}"
            rows.append((f"cuda:{index}", value))
        if not self.cuda_devices:
            rows.append(("cuda", f"none: {self.cuda_reason or 'no device'}"))
        rows.append(("tuning", self.tuning))
        width = max((len(kernel.name) for kernel in self.kernels), default=0)
        for number, kernel in enumerate(self.kernels):
            state = f"no: {kernel.unavailable}" if kernel.unavailable else "ready"
            rows.append(("" if number else "kernels", f"{kernel.name:<{width}}  {state}"))
        return "\n".join(f"{title:<10}{value}".rstrip() for title, value in rows)


def _installed(distribution: str) -> str:
    """Version of a distribution, "" if it is not there: as its folder says, for importlib.metadata
    takes 20 ms to import, which neither `import strobe` nor a call has to spend.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, say
            continue
        for name in names:
            found = re.fullmatch(rf"{distribution}-([^-]+)(-.*)?\.(dist|egg)-info", name)
            if found:
                return found[1]
    return ""


def info() -> Info:
    """Versions, the library's path, this machine's devices, and the kernels: which can run here,
    and why the others cannot. Print it, or read its fields.

    Raises:
        DeviceError: the CUDA driver failed while it was asked about its devices.

    Example:
        >>> import strobe
        >>> [kernel.name for kernel in strobe.info().kernels if not kernel.unavailable]
        ... # doctest: +ELLIPSIS
        [...'cpu_portable'...]
    """
    machine = _core.machine()
    return Info(
        version=_library.VERSION,
        library=os.fspath(_library.LIBRARY_PATH),
        compiler=machine["compiler"],
        python=platform.python_version(),
        numpy=np.__version__,
        torch=_installed("torch"),
        cpu=machine["cpu_name"],
        cpu_isa=machine["cpu_isa"],
        cpu_isas=tuple(machine["cpu_isas"].split()),
        cpu_threads=machine["cpu_threads"],
        cuda_devices=tuple(
            CudaDevice(*_core.cuda_device(index)) for index in range(machine["cuda_devices"])
        ),
        cuda_reason=machine["cuda_reason"],
        tuning=_core.tuning_text(),
        kernels=tuple(Kernel(*row) for row in _core.kernels()),
    )
