"""`python -m strobe` prints versions, the library's path, devices and kernels, and why some cannot
run.
"""

from . import info

print(info())
