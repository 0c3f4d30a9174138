"""The launcher starts what it is asked for, and a stop typed at a terminal reaches the learner, not the launcher."""

import subprocess
import sys
import time
from pathlib import Path

import accelerate.utils
import pytest
import torch

from asyncopd.errors import ConfigError
from asyncopd.launch import LaunchOptions, learner_environment, parse_options, rank_environments
from tests.terminal import is_alive, terminal

CONFIGS = Path(__file__).parent.parent / "asyncopd" / "accelerate_config"
LAUNCH = "import sys; from asyncopd.launch import launch; sys.exit(launch(sys.argv[1:]))"
SUPERVISE = (
    "import os, sys; from asyncopd.launch import rank_environments, supervise; "
    "sys.exit(supervise([sys.executable, *sys.argv[2:]], rank_environments(os.environ, int(sys.argv[1]))))"
)

# The learner: a first SIGINT or SIGTERM asks for a checkpoint, which takes a second; another SIGINT quits at once.
LEARNER = """
import os, signal, sys, time
from pathlib import Path

folder, rank, asked = Path(sys.argv[1]), os.environ.get("RANK", "0"), []


def stop(number, frame):
    if asked and number == signal.SIGINT:
        os._exit(130)
    asked.append(number)


signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while not asked:
    time.sleep(0.01)
(folder / f"stopping-{rank}").touch()
deadline = time.monotonic() + 1
while time.monotonic() < deadline:
    time.sleep(0.01)
(folder / f"checkpoint-{rank}").write_text(signal.Signals(asked[0]).name)
"""


@pytest.fixture
def learner(tmp_path: Path) -> Path:
    script = tmp_path / "learner.py"
    script.write_text(LEARNER)
    return script


def test_ctrl_c_is_awaited_until_the_learner_has_written_its_checkpoint(learner: Path, tmp_path: Path) -> None:
    with terminal(sys.executable, "-c", LAUNCH, "--cpu", str(learner), str(tmp_path)) as shell:
        shell.until((tmp_path / "pid-0").exists)
        shell.press_ctrl_c()
        shell.until((tmp_path / "stopping-0").exists)
        assert shell.process.poll() is None
        assert shell.wait(10) == 0
        assert (tmp_path / "checkpoint-0").read_text() == "SIGINT"
    assert not is_alive(int((tmp_path / "pid-0").read_text()))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_ctrl_c_quits_at_once_and_leaves_nothing_alive(learner: Path, tmp_path: Path, processes: int) -> None:
    ranks = range(processes)
    with terminal(sys.executable, "-c", SUPERVISE, str(processes), str(learner), str(tmp_path)) as shell:
        shell.until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in ranks))
        shell.press_ctrl_c()
        shell.until(lambda: all((tmp_path / f"stopping-{rank}").exists() for rank in ranks))
        pressed = time.monotonic()
        shell.press_ctrl_c()
        assert shell.wait(10) == 130
        assert time.monotonic() - pressed < 0.9
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not any(is_alive(int((tmp_path / f"pid-{rank}").read_text())) for rank in ranks)


def test_ctrl_c_reaches_every_rank_and_is_awaited(learner: Path, tmp_path: Path) -> None:
    with terminal(sys.executable, "-c", SUPERVISE, "2", str(learner), str(tmp_path)) as shell:
        shell.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        shell.press_ctrl_c()
        assert shell.wait(10) == 0
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-1"]


def test_sigterm_to_the_launcher_alone_is_passed_on(learner: Path, tmp_path: Path) -> None:
    with terminal(sys.executable, "-c", SUPERVISE, "1", str(learner), str(tmp_path)) as shell:
        shell.until((tmp_path / "pid-0").exists)
        shell.process.terminate()
        shell.until((tmp_path / "stopping-0").exists)
        shell.process.terminate()
        assert shell.wait(10) == 0
        assert (tmp_path / "checkpoint-0").read_text() == "SIGTERM"


@pytest.mark.parametrize(("ending", "status"), [("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("", 0)])
def test_the_status_of_the_learner_is_that_of_the_launcher(ending: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISE, "1", "-c", f"import os; {ending}"], timeout=30, check=False)
    assert done.returncode == status


def test_a_rank_that_fails_ends_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(60)\n")
    impatient = SUPERVISE.replace(
        "; sys.exit", "; import asyncopd.launch as it; it.FAILED_RANK_GRACE_S = 0.2; sys.exit"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", impatient, "2", str(script)], timeout=30, check=False)
    assert done.returncode == 3
    assert time.monotonic() - started < 20


def test_two_processes_on_a_cpu_are_two_ranks_of_one_group(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys, torch\nfrom pathlib import Path\nfrom accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.tensor(accelerator.process_index + 1), reduction='sum').item()\n"
        "place = Path(sys.argv[1]) / f'rank-{accelerator.process_index}'\n"
        "place.write_text(f'{accelerator.num_processes} {accelerator.device.type} {total}')\n"
        "accelerator.end_training()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, "--cpu", "--num-processes", "2", str(script), str(tmp_path)],
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {
        "rank-0": "2 cpu 3",
        "rank-1": "2 cpu 3",
    }


def test_options_before_the_recipe_are_the_launchers_and_those_after_it_the_recipes(learner: Path) -> None:
    options = parse_options(["--num-processes", "2", str(learner), "--num-processes", "9", "--mode", "sync"])
    assert options.num_processes == 2
    assert options.recipe_args == ("--num-processes", "9", "--mode", "sync")


def test_a_misspelt_option_names_the_nearest(learner: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean --num-processes"):
        parse_options(["--num-proceses=2", str(learner)])


def test_a_missing_recipe_names_what_is_near(learner: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe .*near it are learner\.py"):
        parse_options([str(learner.with_name("leaner.py"))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_machines: 1": "num_machines: 2"}, "several machines"),
        ({"'NO'": "FSDP"}, "FSDP on a CPU"),
        ({"use_cpu: true": "use_cpus: true"}, "accelerate refuses"),
    ],
)
def test_an_accelerate_config_that_would_be_served_wrongly_is_refused(
    learner: Path, change: dict[str, str], message: str
) -> None:
    text = (CONFIGS / "cpu.yaml").read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    config_file = learner.with_name("mine.yaml")
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        learner_environment(LaunchOptions(recipe=learner, config_file=config_file))


def test_a_users_accelerate_config_decides_the_number_of_processes(learner: Path) -> None:
    text = (CONFIGS / "cpu.yaml").read_text().replace("num_processes: 1", "num_processes: 3")
    config_file = learner.with_name("mine.yaml")
    config_file.write_text(text)
    environment, processes = learner_environment(LaunchOptions(recipe=learner, config_file=config_file))
    assert processes == 3
    assert environment["ACCELERATE_USE_CPU"] == "True"


@pytest.fixture
def a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerate.utils, "check_cuda_p2p_ib_support", lambda: False)


@pytest.mark.usefixtures("a_machine_with_gpus")
def test_on_gpus_the_learner_is_one_process_unless_more_are_asked_for(learner: Path) -> None:
    environment, processes = learner_environment(LaunchOptions(recipe=learner))
    assert (processes, environment["ACCELERATE_USE_CPU"]) == (1, "False")
    environment, processes = learner_environment(LaunchOptions(recipe=learner, num_processes=4, gpu_ids="0,1,2,3"))
    assert (processes, environment["ACCELERATE_USE_CPU"]) == (4, "False")
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert (environment["NCCL_P2P_DISABLE"], environment["NCCL_IB_DISABLE"]) == ("1", "1")
    environment, processes = learner_environment(LaunchOptions(recipe=learner, cpu=True))
    assert (processes, environment["ACCELERATE_USE_CPU"]) == (1, "True")


@pytest.mark.usefixtures("a_machine_with_gpus")
def test_on_gpus_an_fsdp_config_reaches_the_learner(learner: Path) -> None:
    config_file = learner.with_name("fsdp.yaml")
    text = (CONFIGS / "gpu.yaml").read_text().replace("'NO'", "FSDP")
    config_file.write_text(text + "fsdp_config:\n  fsdp_version: 2\n")
    environment, processes = learner_environment(
        LaunchOptions(recipe=learner, config_file=config_file, num_processes=2)
    )
    assert processes == 2
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")


def test_a_single_process_belongs_to_no_group() -> None:
    assert rank_environments({"RANK": "3", "MASTER_PORT": "1", "HOME": "/"}, 1) == [{"HOME": "/"}]
