"""``asyncopd audit``: everything that is registered passes; its table, its JSON and its exit status agree."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncopd import cli
from asyncopd.audit import Subject, audit, audit_subject, load_subject, registered_subjects, run_audit
from asyncopd.audit.adapters import trl_jsd, trl_jsd_batchmean
from asyncopd.audit.registered import SMALL_SPECS
from asyncopd.errors import ConfigError
from asyncopd.objectives import DIVERGENCES, SURROGATES
from teacher_cache.designs import DESIGNS
from tests.audit import wrong_losses

EVERY = list(registered_subjects())


def spread(subjects: list[Subject], count: int) -> list[Subject]:
    """Some of them, evenly spread, without the slow token-coupled ones."""
    quick = [subject for subject in subjects if subject.token_local]
    return quick[:: max(1, len(quick) // count)]


def test_every_divergence_surrogate_and_design_is_among_the_registered() -> None:
    names = {subject.name.partition("+")[0] for subject in EVERY}
    assert names == set(DIVERGENCES) | set(SURROGATES)
    assert {subject.design.partition("(")[0] for subject in EVERY} == set(DESIGNS) == set(SMALL_SPECS)
    assert len(EVERY) >= 60


@pytest.mark.parametrize("subject", spread(EVERY, 40), ids=lambda s: f"{s.name}-{s.design}-{s.origins[0]}-{s.form}")
def test_a_registered_combination_passes(subject: Subject) -> None:
    for row in audit_subject(subject):
        assert row.passed, row.failures


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_registered_combination_passes() -> None:
    report = run_audit(EVERY)
    assert [row for row in report.rows if not row.passed] == []
    assert len(report.rows) >= 60


def test_the_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("tests.audit.wrong_losses:right", json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["all_passed"] is True
    keys = {"objective", "design", "form", "stale", "claims_unbiased", "value_bias", "grad_bias", "grad_rel_mse"}
    for row in found["rows"]:
        assert keys | {"cosine", "passed"} <= set(row)
    assert [row["stale"] for row in found["rows"]] == [False, True]


def test_a_wrong_loss_has_exit_status_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("tests.audit.wrong_losses:k1") == 1
    assert "does not depend on the teacher" in " ".join(capsys.readouterr().out.split())


def test_a_loss_that_claims_nothing_is_measured_and_not_judged() -> None:
    modest = replace(wrong_losses.k3, unbiased_fresh=False, unbiased_stale=False)
    rows = audit_subject(modest)
    assert all(row.passed and row.grad_bias > 0.01 for row in rows)


def test_an_undecorated_function_is_taken_for_the_reverse_kl_of_the_sampled_token() -> None:
    assert isinstance(load_subject("torch:numel"), Subject)
    assert load_subject("torch:numel").design == "sampled"


def test_a_loss_in_the_current_folder_is_found_by_the_installed_command_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "losses_of_mine.py").write_text("def mine(batch):\n    return 0 * batch.log_p_T()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert cli.main(["audit", "losses_of_mine:mine", "--json"]) == 1  # it is no reverse KL
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["objective"] for row in rows} == {"mine"}


@pytest.mark.parametrize("target", ["no_colon", "no_such_module_here:x", "torch:no_such_name", "torch:__version__"])
def test_a_target_that_is_no_loss_is_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        load_subject(target)


def test_a_loss_that_raises_fails_with_what_it_raised() -> None:
    def widths(batch: object) -> torch.Tensor:
        logits, teacher = batch.logits_TV, batch.teacher_TV  # type: ignore[attr-defined]
        log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).where(batch.mask_T, 0.0)  # type: ignore[attr-defined]

    subject = replace(wrong_losses.padded_softmax, loss=widths)
    reasons = [reason for row in audit_subject(subject) for reason in row.failures]
    assert any(reason.startswith("padded_heads: raised RuntimeError") for reason in reasons)


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_an_adapter_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="install trl"):
        audit_subject(trl_jsd)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_jsd_of_trl_is_right_but_for_its_mean_over_micro_batches() -> None:
    for row in audit_subject(trl_jsd):
        assert max(row.value_bias, row.grad_bias) < 1e-9
    reasons = [reason for row in audit_subject(trl_jsd_batchmean) for reason in row.failures]
    assert any(reason.startswith("micro_batches") for reason in reasons)
