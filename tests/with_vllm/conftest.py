"""Engines of the vLLM tests, each started once: the start costs far more than any test."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.rollout.vllm_config import VllmEngineConfig
from tests.conftest import EOS, VOCABULARY
from tests.publish.test_adapters import adapted, published
from tests.with_vllm.models import save

KV_CACHE_GB = 0.05


@dataclass(frozen=True)
class Pair:
    """A vLLM engine and how to make the transformers engine with the same settings, over two versions A and B."""

    vllm: object
    transformers: Callable[[], TransformersEngine]
    a: Path
    b: Path

    def load(self, *engines: object, directory: Path, version: int) -> None:
        for engine in engines:
            engine.load_weights(directory, version)


@pytest.fixture(scope="session", autouse=True)
def engines_live_on() -> Iterator[None]:
    """All live until the process ends, because the first engine that goes takes vLLM's process groups with it."""
    from asyncopd.rollout import vllm_engine

    start, alive = vllm_engine._start, []

    def kept(*arguments: object) -> object:
        alive.append(start(*arguments))
        return alive[-1]

    vllm_engine._start = kept
    yield
    vllm_engine._start = start


_started: dict[tuple[object, ...], Pair] = {}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Engines by model kind, sampling, design and vLLM options; version 0 is model A.

    With ``adapters``, which is how vLLM takes them, A and B are adapters of it.
    """
    folder = tmp_path_factory.mktemp("vllm-models")

    def get(
        kind: str,
        *,
        prefix_caching: bool = True,
        slots: int = 6,
        transfers: bool = False,
        adapters: str = "",
        **settings: object,
    ) -> Pair:
        options = sorted((name, str(value)) for name, value in settings.items())
        key = (kind, prefix_caching, slots, transfers, adapters, *options)
        if key not in _started:
            from asyncopd.rollout.vllm_engine import VllmEngine

            a, b = versions = [save(kind, seed, folder) for seed in (0, 9)]
            if adapters:
                versions = [published(adapted(a, seed), folder / "adapters" / kind, seed) for seed in (1, 2)]
            common = {
                "vocabulary": VOCABULARY, "eos_token_ids": (EOS,), "run_seed": 5, "version": 0,
                "sampling": SamplingConfig(max_new_tokens=20), **settings,
            }  # fmt: skip
            config = VllmEngineConfig(kv_cache_gb=KV_CACHE_GB, prefix_caching=prefix_caching)
            rank = 4 if adapters == "apply" else 0
            engine = VllmEngine(a, slots=slots, config=config, transfers=transfers, lora_rank=rank, **common)
            _started[key] = Pair(engine, lambda: TransformersEngine(a, **common), *versions)
        return _started[key]

    return get
