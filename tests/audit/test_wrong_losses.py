"""The audit rejects each wrong loss for the reason for which it is wrong, and accepts the right one."""

import pytest

from asyncopd.audit import Subject, audit_subject, measure
from asyncopd.audit.states import random_state
from tests.audit import wrong_losses


def failures(subject: Subject) -> dict[str, str]:
    """Every failure of the fresh and the stale row, by the name of what failed."""
    rows = audit_subject(subject)
    return {reason.partition(":")[0]: reason for row in rows for reason in row.failures}


@pytest.mark.parametrize("subject", [wrong_losses.right, wrong_losses.right_scalar], ids=lambda s: s.name)
def test_a_right_loss_passes_every_check(subject: Subject) -> None:
    assert failures(subject) == {}


def test_k1_has_the_right_value_and_a_gradient_that_the_teacher_does_not_enter() -> None:
    found = failures(wrong_losses.k1)
    assert "does not depend on the teacher" in found["teacher"]
    assert "gradient" in found
    assert measure(wrong_losses.k1, random_state(5, stale=False)).value_bias < 1e-9


def test_k3_descends_the_other_direction() -> None:
    assert "gradient" in failures(wrong_losses.k3)
    assert measure(wrong_losses.k3, random_state(5, stale=False)).value_bias < 1e-9
    assert measure(wrong_losses.k3_taken_for_what_it_is, random_state(5, stale=False)).grad_bias < 1e-9


def test_a_clamp_removes_the_gradient_where_the_models_disagree_most() -> None:
    assert "gradient" in failures(wrong_losses.top_k_clamped)
    assert "vanishes" in failures(wrong_losses.student_top_k_clamped)["disjoint"]


def test_renormalising_over_one_token_leaves_no_loss() -> None:
    found = failures(wrong_losses.top_k_renormalised)
    assert "does not depend on the teacher" in found["teacher"]
    assert measure(wrong_losses.top_k_renormalised, random_state(5, stale=False)).value == 0.0


def test_a_detached_top_k_reward_has_no_expected_gradient() -> None:
    found = failures(wrong_losses.detached_top_k_reward)
    assert "gradient" in found
    assert float(measure(wrong_losses.detached_top_k_reward, random_state(5, stale=False)).gradient_TV.norm()) < 1e-9


def test_filling_missing_scores_with_zero_is_the_only_fault_of_zero_filled() -> None:
    assert set(failures(wrong_losses.zero_filled)) == {"missing_score"}


def test_scores_of_the_next_position_show_in_the_gradient() -> None:
    found = failures(wrong_losses.off_by_one)
    assert "another position" in found["own_position"]
    assert "gradient" in found


def test_a_mean_over_micro_batches_is_caught_by_splitting_the_step() -> None:
    assert "split" in failures(wrong_losses.mean_of_micro_batches)["micro_batches"]


def test_normalising_over_padded_rows_is_caught_by_padding_the_heads() -> None:
    assert "padded_heads" in failures(wrong_losses.padded_softmax)


def test_computing_in_bf16_is_caught_near_the_teacher() -> None:
    found = failures(wrong_losses.half_precision)
    assert "bf16" in found
    assert "gradient" not in found


def test_candidates_without_weights_are_biased() -> None:
    assert "gradient" in failures(wrong_losses.weightless)
