"""A key names everything that a score depends on, and nothing else."""

from dataclasses import replace

import pytest
import torch

from teacher_cache.designs import parse_design
from teacher_cache.key import DETERMINISTIC, record_key
from tests.teacher_cache.build_requests import IDENTITY, VOCABULARY, make_request

GIVEN = make_request(1, design="systematic(4)")
DRAWN = make_request(1, draw="systematic(4)")


def key(request, identity=IDENTITY, precision="fp32"):
    return record_key(identity.fingerprint, request, precision)


def test_the_key_changes_with_everything_that_the_score_depends_on() -> None:
    assert GIVEN.candidates is not None
    other_ids = replace(GIVEN.candidates, ids_TC=GIVEN.candidates.ids_TC.flip(0))
    others = [
        key(GIVEN, replace(IDENTITY, weights="other")),
        key(GIVEN, replace(IDENTITY, dtype="bf16")),
        key(GIVEN, replace(IDENTITY, temperature=0.6)),
        key(GIVEN, replace(IDENTITY, tokenizer=replace(IDENTITY.tokenizer, digest="other"))),
        key(GIVEN, precision="fp16"),
        key(replace(GIVEN, prompt_ids=GIVEN.prompt_ids[1:])),
        key(replace(GIVEN, prompt_ids=(*GIVEN.prompt_ids, 3))),
        key(replace(GIVEN, response_ids_T=GIVEN.response_ids_T.flip(0))),
        key(replace(GIVEN, candidates=other_ids)),
        key(replace(GIVEN, candidates=None)),
        key(replace(GIVEN, draw="top_k(4)")),
        key(DRAWN),
        key(replace(DRAWN, draw="systematic(5)")),
        key(replace(DRAWN, draw="gumbel(4)")),
        key(replace(DRAWN, run_seed=1)),
        key(replace(DRAWN, uid="another")),
    ]
    assert len({key(GIVEN), *others}) == len(others) + 1


def test_tokens_that_move_from_prompt_to_response_are_another_request() -> None:
    moved = replace(
        make_request(1),
        prompt_ids=(*make_request(1).prompt_ids, int(make_request(1).response_ids_T[0])),
        response_ids_T=make_request(1).response_ids_T[1:],
    )
    assert key(moved) != key(make_request(1))


def test_given_candidates_have_one_key_in_every_run_under_every_weight() -> None:
    assert GIVEN.candidates is not None
    reweighted = replace(GIVEN.candidates, log_w_TC=GIVEN.candidates.log_w_TC + 1, version=8)
    assert key(replace(GIVEN, uid="other", run_seed=5, candidates=reweighted)) == key(GIVEN)


def test_a_second_phase_depends_on_its_weights_and_its_seed() -> None:
    thinned = make_request(1, design="two_phase(8,3)")
    assert thinned.candidates is not None
    reweighted = replace(thinned.candidates, log_w_TC=thinned.candidates.log_w_TC + 1)
    assert len({key(thinned), key(replace(thinned, run_seed=1)), key(replace(thinned, candidates=reweighted))}) == 3


@pytest.mark.parametrize("name", sorted(DETERMINISTIC))
def test_designs_called_deterministic_draw_nothing(name: str) -> None:
    def refuse(count: int) -> torch.Tensor:
        raise AssertionError("drew")

    spec = name if name == "full" else f"{name}(4)"
    parse_design(spec).draw(torch.randn(3, VOCABULARY).log_softmax(-1), refuse, None)
    asked = make_request(1, draw=spec)
    assert key(asked) == key(replace(asked, uid="other", run_seed=2))
