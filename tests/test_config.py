"""What only shows when the components of a configuration come together."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd.config import RunConfig, from_yaml, to_yaml
from asyncopd.errors import ConfigError
from asyncopd.queue.plan import QueueConfig
from asyncopd.rollout.pool import RolloutConfig
from asyncopd.supervisor import WorkerSpec, check_devices

CONFIG = RunConfig(queue=QueueConfig(batch_size=12, max_staleness=2))


def test_a_configuration_survives_being_written_and_read() -> None:
    config = replace(CONFIG, mode="lagged:3", student=Path("some/where"), rollout=RolloutConfig(workers=2))
    assert from_yaml(to_yaml(config), "here") == config


def test_an_unknown_field_of_a_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"notes\.yaml is not a run configuration: .*max_stalenes"):
        from_yaml("queue:\n  max_stalenes: 3\n", "notes.yaml")


@pytest.mark.parametrize(
    ("mode", "lag", "max_staleness"), [("sync", 0, 2), ("lagged:1", 1, 2), ("lagged:7", 7, 7), ("async", None, 2)]
)
def test_a_mode_says_its_lag_and_widens_the_staleness_that_it_needs(
    mode: str, lag: int | None, max_staleness: int
) -> None:
    config = replace(CONFIG, mode=mode)
    assert (config.lag, config.max_staleness) == (lag, max_staleness)


@pytest.mark.parametrize(("slots", "group"), [(1, 1), (5, 4), (8, 6), (12, 12), (64, 12)])
def test_a_group_fits_the_slots_and_divides_the_batch(slots: int, group: int) -> None:
    assert replace(CONFIG, rollout=RolloutConfig(slots=slots, refill=1)).group_size == group


def test_stages_in_turn_get_every_core_and_stages_at_once_share_them() -> None:
    assert replace(CONFIG, mode="sync").threads(8) == (8, 8, 8)
    assert replace(CONFIG, mode="async").threads(8) == (4, 4, 2)
    assert replace(CONFIG, mode="async").threads(2) == (1, 1, 1)
    assert replace(CONFIG, rollout=RolloutConfig(workers=2, threads=3)).threads(8) == (4, 3, 2)


def test_a_gpu_given_twice_is_refused_and_both_holders_named() -> None:
    workers = [
        WorkerSpec(kind="rollout", index=0, threads=1, devices="4,5"),
        WorkerSpec(kind="scorer", index=0, threads=1, devices="5"),
    ]
    with pytest.raises(ConfigError, match="GPU 5 is given to scorer-0 and to rollout-0"):
        check_devices(workers, learner=["0", "1"])
    with pytest.raises(ConfigError, match="GPU 4 is given to rollout-0 and to the learner"):
        check_devices(workers[:1], learner=["4"])


def test_a_worker_does_not_inherit_the_learners_rank() -> None:
    inherited = {"RANK": "1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true", "PATH": "/bin"}
    environment = WorkerSpec(kind="scorer", index=0, threads=3, devices="6").environment(inherited)
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert not {"RANK", "MASTER_PORT", "ACCELERATE_USE_CPU"} & environment.keys()


def test_workers_that_share_the_learners_gpu_are_named(caplog: pytest.LogCaptureFixture) -> None:
    workers = [
        WorkerSpec(kind="rollout", index=0, threads=1, devices="4,5"),
        WorkerSpec(kind="scorer", index=0, threads=1, devices=""),
    ]
    check_devices(workers, learner=[])
    assert caplog.messages == []
    check_devices(workers, learner=["2", "3"])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("scorer-0 will share GPU 2 with the learner")
