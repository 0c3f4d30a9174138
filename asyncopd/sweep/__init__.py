"""Many runs from one specification: a grid over any fields, run side by side, gathered in one table."""

from asyncopd.sweep.runner import Outcome, run_sweep
from asyncopd.sweep.spec import Sweep, SweepRun, read_sweep
from asyncopd.sweep.table import write_table

__all__ = ["Outcome", "Sweep", "SweepRun", "read_sweep", "run_sweep", "write_table"]
