"""The vLLM engine on a GPU against the transformers engine beside it, in under four minutes. Untried: no GPU was here.

    python -m tests.gpu.smoke          # needs the CUDA build of vllm and one GPU; exits with 2 where there is none

The checks are those of ``tests/with_vllm``: greedy text and logprobs before and after swaps A -> B -> A, tied and
untied; candidates; an answer in flight across a swap. Weights come by published files, and again from memory over gloo
and, where there is a second GPU to send from, over NCCL, which must come to the same bits; and as adapters that vLLM
applies in bf16.
"""

import importlib.util
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncopd.publish import WeightStore
from asyncopd.publish.config import PublishConfig
from asyncopd.publish.transfer_publisher import TransferPublisher
from asyncopd.publish.transfer_source import TransferSource
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import Rollout, RolloutRequest
from tests.conftest import EOS, VOCABULARY

TOLERANCE = 1e-3
"""Nats; kernels on GPUs add up in other orders than on a CPU."""
BF16_TOLERANCE = 0.1
"""Nats, on average; what is merged is rounded once more."""
_ALIVE: list[object] = []
"""All engines: the first that goes takes vLLM's process groups with it."""
PROMPTS = ((7, 8, 9), (200, 31), tuple(range(20, 60)), (90,))


def main() -> int:
    """Exit status: 0 all well, 2 nothing to test with."""
    if not torch.cuda.is_available():
        print("no GPU here: this smoke test needs one (the same checks on a CPU: make test-vllm)", file=sys.stderr)
        return 2
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: pip install -e '.[vllm]'", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("tied-llama", "untied-qwen3"):
            started = time.monotonic()
            engine = swaps(kind, Path(folder))
            transfers(engine, kind, Path(folder), "gloo", torch.device("cuda:0"))
            if torch.cuda.device_count() > 1:
                transfers(engine, kind, Path(folder), "nccl", torch.device("cuda:1"))
            else:
                print("nccl: not tried, it needs a second GPU", file=sys.stderr)
            adapters(kind, Path(folder))
            print(f"{kind}: well, {time.monotonic() - started:.0f} s", flush=True)
    return 0


def swaps(kind: str, folder: Path, device: str = "cuda") -> object:
    """All checks on one model over published files; the vLLM engine, at version 9."""
    from asyncopd.rollout.vllm_config import VllmEngineConfig
    from asyncopd.rollout.vllm_engine import VllmEngine
    from tests.with_vllm.models import save

    a, b = save(kind, 0, folder), save(kind, 9, folder)
    settings = {
        "vocabulary": VOCABULARY, "eos_token_ids": (EOS,), "run_seed": 5, "version": 0, "design": "systematic(6)",
        "sampling": SamplingConfig(max_new_tokens=20, min_new_tokens=20, top_k=1),
    }  # fmt: skip
    ours = VllmEngine(
        a,
        slots=4,
        config=VllmEngineConfig(memory_fraction=0.15, kv_cache_gb=0.05, eager=True),
        transfers=True,
        **settings,
    )
    _ALIVE.append(ours)
    theirs = TransformersEngine(a, device=device, **settings)
    for version, directory in enumerate((a, b, a), start=1):
        began = time.monotonic()
        ours.load_weights(directory, version)
        print(f"{kind}: version {version} taken in {time.monotonic() - began:.3f} s")
        theirs.load_weights(directory, version)
        compare(answers(ours), answers(theirs))
        torch.testing.assert_close(ours.logprobs(range(10, 40)), theirs.logprobs(range(10, 40)), atol=TOLERANCE, rtol=0)
    for engine in (ours, theirs):
        submit(engine)
        for _ in range(7):
            engine.step()
        engine.load_weights(b, 9)
    crossed = drain(ours)
    compare(crossed, drain(theirs))
    assert all(rollout.versions_T.tolist() == [3] * 7 + [9] * 13 for rollout in crossed.values())
    return ours


def transfers(engine: object, kind: str, folder: Path, backend: str, device: torch.device) -> None:
    """Versions from memory, sent from ``device``, against the same by file."""
    from tests.with_vllm.models import save

    run_dir, text = Path(tempfile.mkdtemp(dir=folder)), range(10, 40)
    store = WeightStore(run_dir, torch.float32)
    way = {"ranks": 1, "device": device, "needs_file": lambda _: False}
    with closing(TransferPublisher(store, run_dir, PublishConfig(backend=backend, deadline_s=60), **way)) as publisher:
        source = TransferSource(run_dir, store, engine, newest=None, deadline_s=60, beat=lambda: None)
        for version, seed in enumerate((0, 9, 0), start=10):
            directory = save(kind, seed, folder)
            engine.load_weights(directory, version)
            by_file = engine.logprobs(text)
            engine.load_weights(save(kind, 9 - seed, folder), version)
            publisher.publish(version, load_file(directory / "model.safetensors"))
            began = time.monotonic()
            source.move_to(version)
            print(f"{kind}: version {version} taken over {backend} in {time.monotonic() - began:.3f} s")
            assert engine.policy_version == version
            torch.testing.assert_close(engine.logprobs(text), by_file, atol=1e-6, rtol=0)


def adapters(kind: str, folder: Path, device: str = "cuda") -> None:
    """Adapters beside the weights against the same merged, both in bf16: A, B, A, and an answer in flight."""
    from asyncopd.rollout.vllm_config import VllmEngineConfig
    from asyncopd.rollout.vllm_engine import VllmEngine
    from tests.publish.test_adapters import adapted, published
    from tests.with_vllm.models import save

    base, text = save(kind, 0, folder), range(10, 40)
    a, b = (published(adapted(base, seed), folder / f"{kind}-adapters", seed) for seed in (1, 2))
    settings = {
        "vocabulary": VOCABULARY, "eos_token_ids": (EOS,), "run_seed": 5, "sampling": SamplingConfig(max_new_tokens=20),
        "dtype": torch.bfloat16, "version": 0,
    }  # fmt: skip
    options = VllmEngineConfig(memory_fraction=0.15, kv_cache_gb=0.05, eager=True)
    ours = VllmEngine(base, slots=4, config=options, lora_rank=4, **settings)
    _ALIVE.append(ours)
    theirs = TransformersEngine(base, device=device, **settings)
    found = [ours.logprobs(text)]
    for version, directory in enumerate((a, b, a), start=1):
        began = time.monotonic()
        ours.load_weights(directory, version)
        print(f"{kind}: adapters of version {version} taken in {time.monotonic() - began:.3f} s")
        theirs.load_weights(directory, version)
        found.append(ours.logprobs(text))
        assert (found[-1] - theirs.logprobs(text)).abs().mean() < BF16_TOLERANCE
        assert (found[-1] - found[-2]).abs().mean() > 5 * BF16_TOLERANCE
    torch.testing.assert_close(found[3], found[1], atol=1e-6, rtol=0)
    submit(ours)
    ours.step()
    ours.load_weights(b, 9)
    assert all({3, 9} >= set(rollout.versions_T.tolist()) for rollout in drain(ours).values())


def submit(engine: object) -> None:
    engine.submit([RolloutRequest(uid=f"s{i}", prompt_ids=p, min_version=0) for i, p in enumerate(PROMPTS)])


def drain(engine: object) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    while engine.in_flight:
        done |= {rollout.uid: rollout for rollout in engine.step()}
    return done


def answers(engine: object) -> dict[str, Rollout]:
    submit(engine)
    return drain(engine)


def compare(ours: dict[str, Rollout], theirs: dict[str, Rollout]) -> None:
    assert ours.keys() == theirs.keys()
    for uid, expected in theirs.items():
        assert ours[uid].response_ids_T.tolist() == expected.response_ids_T.tolist()
        assert ours[uid].candidates.ids_TC.tolist() == expected.candidates.ids_TC.tolist()


if __name__ == "__main__":
    sys.exit(main())
