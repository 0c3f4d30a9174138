"""Candidates that a pass over the finished answer draws, beside those that the rollout engine draws."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncopd import pipeline
from asyncopd.errors import ConfigError
from asyncopd.learner.read_ahead import read_samples
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.proposal import ProposalPass, check_proposal
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.scoring import TeacherConfig
from asyncopd.tracking.metrics import read_metrics
from asyncopd.types import Rollout, RolloutRequest
from teacher_cache.record import CandidateSet
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from tests.conftest import EOS, VOCABULARY, make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config

PROMPTS = [tuple(range(index, 2 * index + 3)) for index in range(10)]
DESIGNS = ["systematic(6)", "multi_sample(6)", "two_phase(16,4)", "gumbel(5)", "head_tail(4,3)", "top_k(4)", "full"]


def answers(model: Path, spec: str | None, temperature: float = 1.0) -> list[Rollout]:
    engine = TransformersEngine(
        model,
        vocabulary=VOCABULARY,
        eos_token_ids=(EOS,),
        sampling=SamplingConfig(max_new_tokens=30),
        run_seed=2,
        design=spec,
        temperature=temperature,
        version=7,
    )
    engine.submit([RolloutRequest(uid=f"u{n}", prompt_ids=ids, min_version=0) for n, ids in enumerate(PROMPTS)])
    done = []
    while engine.in_flight:
        done += engine.step()
    return done


def request(answer: Rollout) -> ScoreRequest:
    return ScoreRequest(uid=answer.uid, prompt_ids=answer.prompt_ids, response_ids_T=answer.response_ids_T, run_seed=2)


def passed(model: Path, spec: str, asked: Sequence[ScoreRequest], **settings: object) -> list[CandidateSet]:
    proposal = ProposalPass(model, design=spec, vocabulary=VOCABULARY, version=7, **settings)
    drawn = [each.candidates for each in proposal.draw(asked)]
    assert all(isinstance(each, CandidateSet) for each in drawn)
    return [each for each in drawn if each is not None]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("spec", [spec for spec in DESIGNS if spec != "multi_sample(6)"])
def test_the_version_that_generated_draws_the_very_candidates_that_the_engine_drew(
    tiny_model_dir: Path, spec: str, temperature: float
) -> None:
    done = answers(tiny_model_dir, spec, temperature)
    differing = positions = 0
    asked = [request(answer) for answer in done]
    for answer, found in zip(done, passed(tiny_model_dir, spec, asked, temperature=temperature), strict=True):
        expected = answer.candidates
        assert expected is not None
        assert (found.origin, found.design, found.temperature, found.version) == ("student", spec, temperature, 7)
        assert found.ids_TC.shape == expected.ids_TC.shape
        # A forward pass over the whole answer rounds otherwise than one over each token; a draw whose uniform lies
        # within that of an edge falls on its other side.
        same = (found.ids_TC == expected.ids_TC).all(-1)
        differing += int((~same).sum())
        positions += len(same)
        torch.testing.assert_close(found.log_w_TC[same], expected.log_w_TC[same], atol=1e-3, rtol=1e-4)
        assert (found.log_g_TC is None) == (expected.log_g_TC is None)
        if found.log_g_TC is not None and expected.log_g_TC is not None:
            torch.testing.assert_close(found.log_g_TC[same], expected.log_g_TC[same], atol=1e-4, rtol=0)
    assert positions > 100
    assert differing <= positions // 100


@pytest.mark.parametrize("spec", DESIGNS)
def test_what_is_drawn_depends_neither_on_the_batch_nor_on_its_order(tiny_llama_dir: Path, spec: str) -> None:
    asked = [request(answer) for answer in answers(tiny_llama_dir, None)]
    together = passed(tiny_llama_dir, spec, asked)
    apart = passed(tiny_llama_dir, spec, asked[::-1], batch_tokens=1)[::-1]
    same = [torch.equal(one.ids_TC, other.ids_TC) for one, other in zip(together, apart, strict=True)]
    assert sum(same) >= len(same) - 1


def test_the_weights_are_those_of_the_student_that_proposes_and_not_of_the_one_that_generated(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """``sum w*g = 1`` exactly for systematic, so the mass tells whose ``g`` is in the weights."""
    other = save_checkpoint(make_tiny_llama(5), tmp_path / "other")
    asked = [request(answer) for answer in answers(tiny_llama_dir, None)]
    proposal = ProposalPass(tiny_llama_dir, design="systematic(6)", vocabulary=VOCABULARY)
    assert proposal.version == -1
    proposal.load_weights(other, 12)
    drawn = proposal.draw(asked)
    assert {each.candidates.version for each in drawn if each.candidates is not None} == {12}
    for model, whole in ((other, True), (tiny_llama_dir, False)):
        scorer = TransformersScorer(model, vocabulary=VOCABULARY, dtype=torch.float32)
        sets = [record.of_origin("student") for record in scorer.score(drawn)]
        mass = torch.cat([(each.log_w_TC + each.log_q_TC).exp().sum(-1) for each in sets])
        assert bool(((mass - 1).abs() < 1e-3).all()) is whole


@pytest.mark.parametrize("mode", ["sync", "lagged:1"])
def test_in_the_pinned_modes_a_pass_trains_as_the_engines_candidates_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    losses = []
    for proposal in ("rollout", "pass"):
        folder = tmp_path / proposal
        folder.mkdir()
        config = tiny_config(folder, teacher, student, steps=4, mode=mode)
        config = replace(
            config,
            teacher=replace(config.teacher, proposal=proposal),
            queue=replace(config.queue, record=True),
            # A flipped edge of a systematic draw would be another loss; the likeliest tokens flip nowhere here.
            objective=ObjectiveConfig(name="reverse_kl", design="top_k(8)", origin="student"),
        )
        result = pipeline.run(config)
        losses.append([row.values["loss"] for row in read_metrics(result.path) if "loss" in row.values])
        for rollout, candidates in recorded(result.path):
            assert (rollout.candidates is None) == (proposal == "pass")
            assert candidates.version == int(rollout.versions_T.min()) == int(rollout.versions_T.max())
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def recorded(run: Path) -> list[tuple[Rollout, CandidateSet]]:
    """Each trained answer and its student-drawn candidates, in the order of the steps."""
    with Ledger.open(run / "ledger.sqlite") as ledger:
        batches = [ledger.trained_batch(step + 1) for step in range(ledger.policy_version)]
    samples = [sample for batch in batches for sample in read_samples(run, batch.samples)]
    return [(sample.rollout, sample.record.of_origin("student")) for sample in samples]


def test_an_async_run_proposes_from_a_version_at_least_as_new_as_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    config = tiny_config(tmp_path, teacher, student, mode="async")
    config = replace(
        config,
        teacher=replace(config.teacher, proposal="pass"),
        queue=replace(config.queue, record=True),
        objective=replace(config.objective, design="two_phase(16,6)"),
    )
    result = pipeline.run(config)
    found = recorded(result.path)
    assert len(found) == 48
    for rollout, candidates in found:
        assert candidates.version is not None
        assert candidates.version >= int(rollout.versions_T.max())
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []


def test_a_pass_that_has_nothing_to_draw_or_may_not_draw_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected rollout or pass"):
        TeacherConfig(proposal="later")
    for name in ("forward_kl", "pg_recompute"):
        with pytest.raises(ConfigError, match="reads no candidates of the student's"):
            check_proposal("pass", build_objective(ObjectiveConfig(name=name)))
    for spec in ("sampled", "head_tail(8,1)"):
        with pytest.raises(ConfigError, match="only the rollout has"):
            check_proposal("pass", build_objective(ObjectiveConfig(design=spec)))
    for proposal, spec in (("pass", "multi_sample(8)"), ("pass", "systematic(8)"), ("rollout", "sampled")):
        check_proposal(proposal, build_objective(ObjectiveConfig(design=spec)))
