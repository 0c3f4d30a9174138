"""`asyncopd launch [launcher options] recipe.py [recipe options]`: start the learner, and stop it well.

The environment of the learner's processes is accelerate's own (its parser, its config files); the processes are
started here, for two reasons.

* Ctrl-C. The terminal signals every process of the foreground group. `accelerate launch` reacts by exiting at once,
  while the learner is still writing its checkpoint; torchrun puts its workers in sessions of their own, where the
  signal does not arrive, and kills them 30 s after it has passed the signal on. Here the launcher leaves the signal to
  the learner, which stops with a checkpoint (or quits at once at the second one), and waits for it.
* Several processes on a CPU. `accelerate launch --cpu --num_processes 2` starts one process.
"""

import argparse
import difflib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asyncopd.errors import ConfigError

CONFIG_FOLDER = Path(__file__).parent / "accelerate_config"

POLL_S = 0.05
FAILED_RANK_GRACE_S = 10.0
"""How long the other ranks may live on after one has failed: they wait in a collective that will not complete."""
STOPPING_GRACE_S = 300.0
"""The same after a stop was asked for: one rank may be writing the checkpoint for all."""
TERM_GRACE_S = 10.0
"""How long a rank may take to end after SIGTERM before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The launcher's part of the command line.

    config_file     accelerate config; None takes the project's own for a CPU or a GPU
    num_processes   learner processes; None takes the config's
    cpu             use no GPU even where there is one
    gpu_ids         comma-separated ids of the GPUs the learner may see; None leaves all visible
    port            port on which the learner's ranks meet; None takes a free one
    """

    recipe: Path
    recipe_args: tuple[str, ...] = ()
    config_file: Path | None = None
    num_processes: int | None = None
    cpu: bool = False
    gpu_ids: str | None = None
    port: int | None = None


def launch(argv: Sequence[str]) -> int:
    """Run a recipe under the launcher; returns the exit status for the shell.

    The status is that of the first learner process that failed, 128 + n if signal n ended it, otherwise 0.
    Raises ConfigError for an option, recipe or accelerate config that cannot work.
    """
    options = parse_options(argv)
    try:
        environment, num_processes = learner_environment(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    command = [sys.executable, str(options.recipe), *options.recipe_args]
    return supervise(command, rank_environments(environment, num_processes, options.port))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        near = difflib.get_close_matches(unknown.split("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near and near[0] != unknown else ""
        raise ConfigError(
            f"asyncopd launch: {message}{hint} (launcher options stand before the recipe, the recipe's own after it)"
        )


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Split the command line into the launcher's options, the recipe and what belongs to the recipe."""
    parser = _Parser(
        prog="asyncopd launch",
        usage="asyncopd launch [launcher options] recipe.py [recipe options]",
        description="Run a recipe; Ctrl-C stops it with a checkpoint, a second Ctrl-C at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-file", type=Path, help="accelerate config file (default: the project's own)")
    parser.add_argument("--num-processes", type=int, help="learner processes on this machine")
    parser.add_argument("--cpu", action="store_true", help="use no GPU even where there is one")
    parser.add_argument("--gpu-ids", help="GPUs the learner may see, for example 0,1")
    parser.add_argument("--port", type=int, help="port on which the learner's processes meet (default: a free one)")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("recipe_args", nargs=argparse.REMAINDER)
    found = parser.parse_args(list(argv))
    found.recipe_args = tuple(found.recipe_args)
    options = LaunchOptions(**vars(found))
    _require_file(options.recipe, "recipe")
    if options.config_file is not None:
        _require_file(options.config_file, "accelerate config file")
    if options.num_processes is not None and options.num_processes < 1:
        raise ConfigError(f"--num-processes is {options.num_processes}; expected at least 1")
    return options


def _require_file(path: Path, what: str) -> None:
    if path.is_file():
        return
    folder = path.parent
    siblings = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=3)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise ConfigError(f"there is no {what} {str(path)!r}{hint}")


def learner_environment(options: LaunchOptions) -> tuple[dict[str, str], int]:
    """The environment accelerate prescribes for the learner, and the number of processes.

    Raises ConfigError for a config that this launcher cannot serve.
    """
    # Imported here since both take seconds to load, which parsing and supervising need not wait for.
    import torch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import check_cuda_p2p_ib_support
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    on_cpu = options.cpu or not torch.cuda.is_available()
    config_file = options.config_file or CONFIG_FOLDER / ("cpu.yaml" if on_cpu else "gpu.yaml")
    words = ["--config_file", str(config_file), "--main_process_port", "0"]
    if options.cpu:
        words.append("--cpu")
    if options.gpu_ids is not None:
        words += ["--gpu_ids", options.gpu_ids]
    try:
        num_processes = options.num_processes or load_config_from_file(str(config_file)).num_processes
        words += ["--num_processes", str(num_processes)]
        # accelerate's own default fails where the number of physical cores cannot be read, as on many ARM machines.
        threads = os.environ.get("OMP_NUM_THREADS", max(1, torch.get_num_threads() // max(1, num_processes)))
        words += ["--num_cpu_threads_per_process", str(threads)]
        # accelerate has no public function that merges its config file with its options.
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, str(options.recipe)]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"accelerate refuses {config_file}: {error}") from error
    _refuse_what_is_not_served(args, config_file)
    use_cpu = bool(args.cpu or args.use_cpu)
    if use_cpu or not (args.use_fsdp or args.multi_gpu or args.num_processes > 1):
        _, environment = prepare_simple_launcher_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
        if not check_cuda_p2p_ib_support():
            # On such cards accelerate refuses to start a group unless the launcher has switched both off.
            environment = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} | environment
    environment["ACCELERATE_USE_CPU"] = str(use_cpu)
    # accelerate asks Intel's OpenMP to pin threads from core 0 on; learner and workers would all share that core.
    environment.pop("KMP_AFFINITY", None)
    return environment, args.num_processes


def _refuse_what_is_not_served(args: argparse.Namespace, config_file: Path) -> None:
    remedy = "start the recipe with `accelerate launch` itself (Ctrl-C then ends the launcher before the learner)"
    unserved = {
        "several machines": (args.num_machines or 1) > 1,
        "DeepSpeed": args.use_deepspeed,
        "Megatron-LM": args.use_megatron_lm,
        "TPUs": args.tpu,
        "MPI": args.mpirun_hostfile is not None,
    }
    for feature, asked in unserved.items():
        if asked:
            raise ConfigError(f"{config_file} asks for {feature}, which `asyncopd launch` does not serve; {remedy}")
    if args.use_fsdp and (args.cpu or args.use_cpu):
        raise ConfigError(
            f"{config_file} asks for FSDP on a CPU, where accelerate silently falls back to plain data parallel; "
            "use distributed_type: 'NO', and --learner.sharding fsdp2 to spread the student over the processes"
        )


def rank_environments(
    environment: Mapping[str, str], num_processes: int, port: int | None = None
) -> list[dict[str, str]]:
    """One environment a learner process, in the variables that torch.distributed's env:// rendezvous reads.

    A single process gets none of them, so that nothing takes it for a member of a group.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    common = {name: value for name, value in environment.items() if name not in names}
    if num_processes == 1:
        return [common]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port())}
    group |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    return [common | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _StopRequests:
    """What the launcher does about signals: SIGINT and SIGHUP are the learner's affair, SIGTERM is passed on once."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.asked = False
        self.passed_on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        # A handler that does nothing rather than SIG_IGN, which the children would inherit.
        reactions: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._note,
            signal.SIGHUP: self._note,
            signal.SIGTERM: self._pass_on,
        }
        before = {number: signal.getsignal(number) for number in reactions}
        for number, reaction in reactions.items():
            # What was ignored when we started (nohup, a job in the background of a script) stays ignored.
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, reaction)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # Supervisors repeat themselves (timeout signals its child, then its group); the learner may count requests.
        if not self.passed_on:
            self.passed_on = True
            for child in self.children:
                child.send_signal(signal.SIGTERM)


def supervise(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Start one process an environment, in this process group, and wait until all have ended; see `launch`."""
    requests = _StopRequests()
    with requests.installed():
        try:
            for environment in environments:
                requests.children.append(subprocess.Popen(list(command), env=dict(environment)))
            code = _wait(requests)
        finally:
            _end(requests.children)
    return code


def _wait(requests: _StopRequests) -> int:
    """Wait for every process; once one has failed the others get a grace, then the caller ends them."""
    failure, failed_at = 0, float("inf")
    while True:
        codes = [child.poll() for child in requests.children]
        failed = [code for code in codes if code]
        if failed and not failure:
            failure, failed_at = (failed[0] if failed[0] > 0 else 128 - failed[0]), time.monotonic()
        grace_s = STOPPING_GRACE_S if requests.asked else FAILED_RANK_GRACE_S
        if None not in codes or time.monotonic() > failed_at + grace_s:
            return failure
        time.sleep(POLL_S)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.terminate()
    deadline = time.monotonic() + TERM_GRACE_S
    for child in alive:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
