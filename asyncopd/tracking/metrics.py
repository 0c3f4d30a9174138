"""The metric rows of a run, and its evaluations with their sample answers, as files that are only ever appended to.

Names and units of the metrics: `asyncopd.tracking.keys`. A row is kept whatever its version, also when versions go
backwards. After a resume at version V the rows of later versions, written before it, belong to a timeline that did not
happen: `rewind(V)` appends a mark, the rows stay in the file, and readers skip them.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asyncopd.tracking import keys
from asyncopd.tracking.jsonl import JsonLinesFollower, JsonLinesWriter, as_float

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

Values: TypeAlias = Mapping[str, "float | Values"]
"""Numbers by name; a nested mapping is flattened with "/"."""


class EstimateLike(Protocol):
    """A mean with the half-width of its 95% interval."""

    @property
    def mean(self) -> float: ...

    @property
    def ci95(self) -> float: ...


class HeldOutLike(Protocol):
    """What an evaluation on held-out prompts gives: KL in nats per token, length in tokens, EOS share 0 to 1."""

    @property
    def reverse_kl(self) -> EstimateLike: ...

    @property
    def forward_kl(self) -> EstimateLike: ...

    @property
    def mean_length(self) -> EstimateLike: ...

    @property
    def eos_share(self) -> float: ...

    @property
    def samples(self) -> Sequence[tuple[str, str]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRow:
    """One row: the policy version, the unix time in seconds, and the values by flat name."""

    policy_version: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEstimate:
    """An `EstimateLike` read back from a file."""

    mean: float
    ci95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation read back from a run folder; has the attributes of `HeldOutLike`. Samples: prompt and answer."""

    policy_version: int
    time: float
    reverse_kl: RecordedEstimate
    forward_kl: RecordedEstimate
    mean_length: RecordedEstimate
    eos_share: float
    samples: tuple[tuple[str, str], ...]


class MetricsLog:
    """Writes `metrics.jsonl` and `evaluations.jsonl` of a run; one process of the run does."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = JsonLinesWriter(Path(run_dir) / METRICS_FILE)
        self._evaluations = JsonLinesWriter(Path(run_dir) / EVALUATIONS_FILE)

    def log(self, policy_version: int, values: Values) -> None:
        """Append one row; raises TypeError for a value that is not a number."""
        self._metrics.append({"policy_version": policy_version, "time": time.time(), **flatten(values)})

    def evaluation(self, policy_version: int, held_out: HeldOutLike) -> None:
        """Append an evaluation with its sample answers; `log(version, held_out_values(...))` is what gets drawn."""
        record: dict[str, Any] = {"policy_version": policy_version, "time": time.time()}
        for name, estimate in (
            ("reverse_kl", held_out.reverse_kl),
            ("forward_kl", held_out.forward_kl),
            ("mean_length", held_out.mean_length),
        ):
            record[name] = {"mean": float(estimate.mean), "ci95": float(estimate.ci95)}
        record["eos_share"] = float(held_out.eos_share)
        record["samples"] = [[prompt, answer] for prompt, answer in held_out.samples]
        self._evaluations.append(record)

    def rewind(self, policy_version: int) -> None:
        """State that the run goes on from this version: rows of later versions, so far, did not happen."""
        mark = {"rewind": policy_version, "time": time.time()}
        self._metrics.append(mark)
        self._evaluations.append(mark)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the files; the summary has a file of its own."""
        self._metrics.close()
        self._evaluations.close()


class MetricsFollower:
    """Reads the rows of a running run bit by bit; `rows` holds those of the timeline that counts.

    names   keep only these values of a row, so that watching a long run takes little memory; None keeps all
    """

    def __init__(self, run_dir: Path, names: Collection[str] | None = None) -> None:
        self._file = JsonLinesFollower(Path(run_dir) / METRICS_FILE)
        self._names = names
        self.rows: list[MetricsRow] = []

    def read(self) -> list[MetricsRow]:
        for record in self._file.read():
            if "rewind" in record:
                self.rows = [row for row in self.rows if row.policy_version <= record["rewind"]]
            elif "policy_version" in record:
                self.rows.append(_row(record, self._names))
        return self.rows


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Rows in the order written, without those of lost timelines; none when there is no file."""
    return MetricsFollower(run_dir).read()


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Evaluations in the order made, without those of lost timelines."""
    kept: list[Evaluation] = []
    for record in JsonLinesFollower(Path(run_dir) / EVALUATIONS_FILE).read():
        if "rewind" in record:
            kept = [evaluation for evaluation in kept if evaluation.policy_version <= record["rewind"]]
        else:
            kept.append(_evaluation(record))
    return kept


def held_out_values(held_out: HeldOutLike) -> dict[str, float]:
    """The numbers of an evaluation under their metric names (`held_out/...`)."""
    values = {keys.HELD_OUT_EOS: float(held_out.eos_share)}
    for name, estimate in (
        (keys.HELD_OUT_REVERSE_KL, held_out.reverse_kl),
        (keys.HELD_OUT_FORWARD_KL, held_out.forward_kl),
        (keys.HELD_OUT_LENGTH, held_out.mean_length),
    ):
        values[f"{name}/mean"] = float(estimate.mean)
        values[f"{name}/ci95"] = float(estimate.ci95)
    return values


def series(rows: Sequence[MetricsRow], name: str) -> list[tuple[MetricsRow, float]]:
    """The rows that have a metric, with its value."""
    return [(row, row.values[name]) for row in rows if name in row.values]


def last(rows: Sequence[MetricsRow], name: str) -> float | None:
    """The newest value of a metric, or None."""
    return next((row.values[name] for row in reversed(rows) if name in row.values), None)


def under(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The values below `prefix/`, by the rest of their names."""
    start = prefix + "/"
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def flatten(values: Values, prefix: str = "") -> dict[str, float]:
    """Nested values as one level, names joined with "/"; raises TypeError for a value that is not a number."""
    return dict(_flat(values, prefix))


def _flat(values: Values, prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
        else:
            raise TypeError(f"metric {prefix}{name} is a {type(value).__name__}; log a float, int or a mapping of them")


def _row(record: Mapping[str, Any], names: Collection[str] | None) -> MetricsRow:
    kept = record.keys() - {"policy_version", "time"} if names is None else record.keys() & names
    numbers = ((name, as_float(record[name])) for name in record if name in kept)
    values = {name: value for name, value in numbers if value is not None}
    return MetricsRow(policy_version=record["policy_version"], time=record["time"], values=values)


def _evaluation(record: Mapping[str, Any]) -> Evaluation:
    def estimate(name: str) -> RecordedEstimate:
        return RecordedEstimate(mean=_number(record[name]["mean"]), ci95=_number(record[name]["ci95"]))

    return Evaluation(
        policy_version=record["policy_version"],
        time=record["time"],
        reverse_kl=estimate("reverse_kl"),
        forward_kl=estimate("forward_kl"),
        mean_length=estimate("mean_length"),
        eos_share=_number(record["eos_share"]),
        samples=tuple((prompt, answer) for prompt, answer in record["samples"]),
    )


def _number(value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ValueError(f"{value!r} in {EVALUATIONS_FILE} is not a number")
    return number
