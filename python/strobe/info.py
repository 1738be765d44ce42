"""`python -m strobe.info` prints versions, the library's path, devices and kernels, and why some
cannot run.

`strobe.info` is a function. Importing this module by name (`import strobe.info`) puts the module in
the function's place, so the module can be called like the function.
"""

from __future__ import annotations

import sys
import types

from ._info import CudaDevice, Info, Kernel, info

__all__ = ["CudaDevice", "Info", "Kernel", "info"]


class _CallableModule(types.ModuleType):
    def __call__(self) -> Info:
        return info()


if __name__ == "__main__":
    print(info())
else:
    sys.modules[__name__].__class__ = _CallableModule
