"""What stops a run, and what does not: weights that did not arrive whole, and a request that an engine refuses."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncopd import pipeline, workers
from asyncopd.config import RunConfig
from asyncopd.errors import RequestRefusedError, WeightsMismatchError, WorkerDiedError
from asyncopd.learner.adapters import LoraConfig
from asyncopd.learner.step import Learner
from asyncopd.pipeline import run
from asyncopd.publish.probe import TOKENS, ProbeText
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout import transformers_engine
from asyncopd.rollout.engine import RolloutEngine
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.run_folder import TokenIds
from asyncopd.types import RolloutRequest
from tests.conftest import EOS, VOCABULARY, make_tiny_llama, make_tiny_qwen3, save_checkpoint
from tests.learner import ranks
from tests.tiny_run import ThreadedWorkers, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_qwen3(1), folder / "student"
    )


# The warm-up's first step has a learning rate of 0, so version 1 holds the first weights still.


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)


def test_a_head_that_is_left_out_of_an_update_stops_a_run_of_processes(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first = Learner.weights, {}

    def without_head(learner: Learner) -> dict[str, Tensor]:
        weights = dict(whole(learner))
        head = first.setdefault("head", weights["lm_head.weight"].detach().clone())
        return {**weights, "lm_head.weight": head}

    monkeypatch.setattr(Learner, "weights", without_head)
    with pytest.raises(WorkerDiedError, match=r"after loading policy version 2 .*differ") as died:
        run(tiny_config(tmp_path, *models))
    assert died.value.stage == "rollout-0"
    assert "after 3 restarts" not in died.value.detail


@pytest.mark.usefixtures("threads")
def test_half_an_update_is_found_at_the_first_version_that_moved_the_weights(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = transformers_engine.load_weights_into, []

    def half(model: torch.nn.Module, directory: Path) -> None:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        load(model, directory)
        loads.append(directory)
        if len(loads) > 1:
            kept = {name: tensor for name, tensor in before.items() if ".layers.2." in name}
            model.load_state_dict(kept, strict=False)

    monkeypatch.setattr(transformers_engine, "load_weights_into", half)
    with pytest.raises(WeightsMismatchError, match="policy version 2 "):
        run(tiny_config(tmp_path, *models))
    assert len(loads) == 3


@pytest.mark.parametrize("lora", [LoraConfig(), ranks.LORA], ids=["weights", "adapters applied"])
def test_a_probe_is_of_the_weights_as_they_are_published_and_leaves_them_as_they_are(lora: LoraConfig) -> None:
    config = replace(ranks.CONFIG, lora=lora)
    learner = ranks.make_learner(ranks.open_accelerator(config), "tied", config)
    ranks.train(learner, 0, 2)
    before = {name: tensor.clone() for name, tensor in learner.student.state_dict().items()}
    ids = tuple(range(10, 34))
    if lora.rank:
        assert learner.published_logprobs(ids, torch.bfloat16, merged=True) is None
    found = learner.published_logprobs(ids, torch.bfloat16, merged=False)
    exact = learner.published_logprobs(ids, torch.float32)
    published = copy.deepcopy(learner.student)
    for parameter in published.parameters():
        parameter.data = parameter.data.bfloat16()
    expected = TransformersEngine(
        published.float(), vocabulary=VOCABULARY, eos_token_ids=(EOS,), sampling=SamplingConfig(), run_seed=0
    ).logprobs(ids)
    assert found is not None
    assert exact is not None
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - exact).abs().mean() > 1e-3
    for name, tensor in learner.student.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_first_versions_are_probed_and_then_ever_fewer() -> None:
    text = ProbeText.of([(5, 6)], torch.float32)
    probed = [updates for updates in range(1, 200) if text.due(updates)]
    assert probed == [*range(1, 9), 16, 32, 64, 128]


def test_a_probe_is_of_a_prompt_with_enough_tokens_and_one_token_is_no_probe() -> None:
    assert ProbeText.of([(5,), (6, 7, 8), (9, 10, 11)], torch.float32).ids == (6, 7, 8)
    assert len(ProbeText.of([(5,), tuple(range(100))], torch.float32).ids) == TOKENS
    assert not ProbeText.of([(5,)], torch.float32).due(1)


@pytest.mark.usefixtures("threads")
def test_a_sample_that_the_engine_refuses_is_quarantined_and_the_run_goes_on(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = workers.ENGINES["transformers"]
    refused = set()

    def picky(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
        engine = build(config, ids, index)
        take = engine.submit

        def submit(requests: Sequence[RolloutRequest]) -> None:
            for request in requests:
                if request.prompt_ids[-15] % 5 == 0:
                    refused.add(request.uid)
                    raise RequestRefusedError(f"{request.uid} is not to the engine's liking")
            take(requests)

        monkeypatch.setattr(engine, "submit", submit)
        return engine

    monkeypatch.setitem(workers.ENGINES, "transformers", picky)
    config = tiny_config(tmp_path, *models)
    config = replace(config, data=replace(config.data, shuffle=False))
    result = run(config)
    assert result.policy_version == config.steps
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        counts = ledger.counts()
    assert len(refused) > 0
    assert counts.dropped_by_reason == {"refused": len(refused)}
    assert counts.trained + counts.dropped == config.steps * config.queue.batch_size
