"""The whole lab again: every sweep, its table in ``docs/results``, and the notebooks with their figures.

make lab          # python recipes/lab/run_lab.py
make lab-smollm2  # python recipes/lab/run_lab.py --smollm2: the sweeps of SmolLM2, and the notebooks
make lab-smoke    # python recipes/lab/run_lab.py --smoke: two steps of one seed, into a folder that is thrown away
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

LAB = Path(__file__).parent
ROOT = LAB.parent.parent
SWEEPS = ("past", "directions", "corrections", "designs", "rates", "throughput")
SMOLLM2 = ("smollm2", "smollm2_throughput")
SMOKE = {
    "past": ["mode=sync"],
    "directions": ["mode=sync"],
    "corrections": ["mode=lagged:1"],
    "throughput": ["way=sync"],
}
"""What the smoke form runs of some sweeps."""
NOTEBOOKS = (
    "02_kl_direction_under_staleness",
    "03_corrections_under_staleness",
    "04_cache_size_bias_and_variance",
    "05_throughput_against_staleness",
    "06_past_the_paper",
)


def sweep(name: str, *options: str) -> None:
    """Run one sweep; what is done already is not done again."""
    command = [sys.executable, "-m", "asyncopd.cli", "sweep", str(LAB / "sweeps" / f"{name}.yaml"), *options]
    ended = subprocess.run(command, cwd=ROOT, check=False).returncode
    if ended:
        sys.stdout.write(f"the sweep {name} ended with {ended}: its table says which runs failed\n")


def execute(name: str) -> None:
    """Run a notebook on the tables in ``docs/results`` and keep what it shows."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    nbformat.write(notebook, path)


def main() -> int:
    """Run it, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="the sweeps of SmolLM2 in place of the lab's")
    parser.add_argument("--smoke", action="store_true", help="two steps of one seed of every method, on-policy")
    parser.add_argument("--out", type=Path, help="folder that keeps the tables of the smoke form")
    began, asked = time.monotonic(), parser.parse_args()
    if asked.smoke:
        with tempfile.TemporaryDirectory() as folder:
            for name in SWEEPS:
                out = str(asked.out or folder)
                sweep(name, "seed=0", *SMOKE.get(name, []), "--out", out, "--set", "steps=2", f"runs_dir={folder}")
    else:
        for name in SMOLLM2 if asked.smollm2 else SWEEPS:
            sweep(name, "--out", str(ROOT / "docs" / "results"))
        for name in NOTEBOOKS:
            execute(name)
    sys.stdout.write(f"the lab took {(time.monotonic() - began) / 60:.1f} minutes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
