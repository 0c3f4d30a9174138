"""Running the audit and showing what it found."""

import importlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import isfinite

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asyncopd.audit.checks import CHECKS, EXACT, VOCABULARY
from asyncopd.audit.measure import measure
from asyncopd.audit.registered import registered_subjects
from asyncopd.audit.states import random_state
from asyncopd.audit.subject import Subject, audited
from asyncopd.errors import ConfigError

_COLUMNS = ("objective", "design", "origin", "form", "", "claims", "value bias", "gradient bias", "rel. MSE", "cosine")
_WIDTH = 150
"""Columns of text that the table needs; a narrower terminal wraps its lines."""

HELP = """Check a distillation loss by exact enumeration on a small vocabulary, in float64.

TARGET is module:name of a loss, a function of one AuditBatch that returns either one number a token (nats, unreduced,
0 where masked) or one scalar (the sum over valid tokens divided by batch.step_tokens). Decorate it with
asyncopd.audit.audited(target=..., design=..., origin=...) to state what it estimates and how its candidates are drawn;
undecorated, it is taken for the reverse KL on the sampled token. Without TARGET every combination that the registries
offer is audited. The exit status is 0 only if everything that claims to be unbiased is.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """One loss, fresh or stale.

    value_bias, grad_bias   relative errors of expected value and gradient
    grad_rel_mse            expected squared gradient error / squared norm of the true gradient
    cosine                  of expected and true gradient; None where one of them is zero
    failures                ``check: reason`` of whatever failed
    """

    objective: str
    design: str
    origin: str
    form: str
    stale: bool
    claims_unbiased: bool
    value_bias: float
    grad_bias: float
    grad_rel_mse: float
    cosine: float | None
    passed: bool
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """All rows; ``all_passed`` is what the exit status says."""

    rows: tuple[AuditRow, ...]

    @property
    def all_passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def to_json(self) -> str:
        """``rows`` and ``all_passed``."""
        return json.dumps({"rows": [asdict(row) for row in self.rows], "all_passed": self.all_passed}, indent=1)


def run_audit(subjects: Iterable[Subject]) -> AuditReport:
    """Enumerate each subject fresh and stale, and run every check on it."""
    return AuditReport(rows=tuple(row for subject in subjects for row in audit_subject(subject)))


def audit_subject(subject: Subject) -> tuple[AuditRow, AuditRow]:
    """The fresh and the stale row of a subject; the checks count for both."""
    reasons = [f"{name}: {reason}" for name in CHECKS if (reason := _reason(subject, name)) is not None]
    return _row(subject, False, reasons), _row(subject, True, reasons)


def _reason(subject: Subject, check: str) -> str | None:
    """Why a check fails; what tensors raise inside the loss is a reason, too."""
    try:
        return CHECKS[check](subject)
    except (RuntimeError, IndexError) as error:
        return f"raised {type(error).__name__}: {error}"


def _row(subject: Subject, stale: bool, reasons: list[str]) -> AuditRow:
    found = measure(subject, random_state(VOCABULARY, stale=stale))
    claims = subject.unbiased_stale if stale else subject.unbiased_fresh
    failures = list(reasons)
    if claims and not found.grad_bias <= EXACT:
        failures.append(f"gradient: the expected gradient is off by {found.grad_bias:.2g}")
    if claims and subject.estimates_value and not found.value_bias <= EXACT:
        failures.append(f"value: the expected value is off by {found.value_bias:.2g}")
    return AuditRow(
        objective=subject.name,
        design=subject.design,
        origin="+".join(subject.origins),
        form=subject.form,
        stale=stale,
        claims_unbiased=claims,
        value_bias=found.value_bias,
        grad_bias=found.grad_bias,
        grad_rel_mse=found.grad_rel_mse,
        cosine=found.cosine if isfinite(found.cosine) else None,
        passed=not failures,
        failures=tuple(failures),
    )


def load_subject(target: str) -> Subject:
    """The loss at ``module:name``; ConfigError where there is none."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{target!r} names no loss; write module:name, for example my_package.losses:my_loss")
    try:
        found = vars(importlib.import_module(module))[name]
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module!r}: {error}; run from where it is importable") from error
    except KeyError as error:
        raise ConfigError(f"module {module!r} has no {name!r}") from error
    if isinstance(found, Subject):
        return found
    if not callable(found):
        raise ConfigError(f"{target} is a {type(found).__name__}; the audit takes a function of one AuditBatch")
    return audited()(found)


def audit(target: str | None = None, json: bool = False) -> int:
    """The ``asyncopd audit`` command: show the table (or JSON) on standard output, return the exit status."""
    report = run_audit(registered_subjects() if target is None else [load_subject(target)])
    terminal = Console()
    console = terminal if terminal.width >= _WIDTH else Console(width=_WIDTH, soft_wrap=True)
    if json:
        console.file.write(report.to_json() + "\n")
    else:
        _show(report, console)
    return 0 if report.all_passed else 1


def _show(report: AuditReport, console: Console) -> None:
    table = Table(box=SIMPLE, pad_edge=False)
    for title in (*_COLUMNS, ""):
        table.add_column(title, no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.objective,
            row.design,
            row.origin,
            row.form,
            "stale" if row.stale else "fresh",
            "unbiased" if row.claims_unbiased else "-",
            f"{row.value_bias:.1e}",
            f"{row.grad_bias:.1e}",
            f"{row.grad_rel_mse:.3g}",
            "-" if row.cosine is None else f"{row.cosine:.4f}",
            "ok" if row.passed else "FAILED",
        )
    console.print(table)
    for row in report.rows:
        for reason in row.failures:
            console.print(f"{row.objective} {row.design} {'stale' if row.stale else 'fresh'}: {reason}", markup=False)
    failed = sum(not row.passed for row in report.rows)
    console.print(
        f"{len(report.rows)} rows, {failed} failed; {sum(r.claims_unbiased for r in report.rows)} claim to be unbiased"
    )
