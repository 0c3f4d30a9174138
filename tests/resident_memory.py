"""The resident set of this process and its peak, as Linux counts them."""

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_mib() -> float:
    """Now."""
    return _read("VmRSS")


def forget_peak() -> None:
    """Let the peak begin again at the resident set of now."""
    _CLEAR.write_text("5")


def peak_mib() -> float:
    """Largest since ``forget_peak``."""
    return _read("VmHWM")


def _read(name: str) -> float:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) / 1024
