"""Keep freed memory in the process: on a CPU, a training step otherwise returns and refaults gigabytes of pages."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt(3)
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have glibc serve large blocks from its heap and keep them; False where the C library is another one.

    Measured on SmolLM2 (113M parameters, 12 answers of 48 tokens, one core): 410,000 page faults a step become none,
    and a step takes 2.6 s instead of 3.4 s. The process holds its peak memory until it ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL("libc.so.6")
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST))
