"""Whether a process that a run started is still the same one and still alive."""

import psutil

_BIRTH_TOLERANCE_S = 2.0  # psutil adds the boot time, which moves with corrections of the system clock


def process_birth(pid: int) -> float | None:
    """Start of a living process, unix seconds; None when there is none.

    Together with the pid it names a process for good, since the system gives pids out again.
    """
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, birth: float | None) -> bool:
    """True while the process with this pid, born at that time, runs; a zombie is dead.

    Without a birth any process of that pid counts. A run on another machine reads as dead.
    """
    try:
        process = psutil.Process(pid)
        same = birth is None or abs(process.create_time() - birth) < _BIRTH_TOLERANCE_S
        return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
