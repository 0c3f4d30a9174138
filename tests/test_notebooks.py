"""Every notebook runs from its first cell to its last, in a short form: the lab's, on tables of its smoke form."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def lab_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make lab-smoke`` finds."""
    folder = tmp_path_factory.mktemp("lab")
    command = [sys.executable, str(ROOT / "recipes" / "lab" / "run_lab.py"), "--smoke", "--out", str(folder)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count(" 0 failed") == 6, told.stdout
    assert "ended with" not in told.stdout
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_ends_with_its_answer(
    path: Path, lab_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCOPD_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("ASYNCOPD_LAB_TABLES", str(lab_tables))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert "**Question:" in notebook.cells[0].source
    (last,) = notebook.cells[-1].outputs
    assert last.text.startswith("Answer: ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_the_outputs_of_its_full_form(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    table = notebook.metadata.get("table")
    if table is not None and not (ROOT / "docs" / "results" / f"{table}.csv").exists():
        pytest.skip(f"the sweep {table} was not run in full yet: make lab")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert cells[-1].outputs[0].text.startswith("Answer: ")
