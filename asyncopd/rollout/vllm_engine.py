"""Rollouts with vLLM, in this process and stepped by the pool.

Why vLLM's synchronous ``LLMEngine`` and not ``AsyncLLM``: one call of ``step`` is one token of every answer, and
between two calls nothing runs. So weights are swapped without pausing anything, it is certain which version sampled a
token, and an engine that hangs shows as a pool that does not step. Answers leave as each one ends all the same.

What is sampled is decided in ``vllm_worker``, by the code that the transformers engine runs.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import LoRAAdapterNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from asyncopd.errors import CheckpointError, RequestRefusedError, RolloutError
from asyncopd.publish.transfer_group import Rendezvous
from asyncopd.publish.transfer_publisher import Offer
from asyncopd.rollout.answers import Answer, AnswerSampler, check_version
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_config import LORA_RANKS, VllmEngineConfig
from asyncopd.rollout.vllm_worker import SETTINGS, AnswerProcessor, StepDraws, WorkerExtension
from asyncopd.rollout.weights import check_adapters, check_fit, check_shapes, stored_shapes
from asyncopd.types import Rollout, RolloutRequest

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The other model runner offers no logits processor that sees what was generated so far.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# It warns at every swap of modules that have no weights of their own; what is missing is found before the swap.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class VllmEngine:
    """A RolloutEngine over one vLLM engine.

    model        directory of an HF checkpoint; published weights must have its tensors
    slots        most answers in flight at the same time
    transfers    whether it will be asked to ``receive_weights``
    lora_rank    of the adapters that are applied beside the weights of ``model``; 0: they are merged into them
    vocabulary, eos_token_ids, sampling, run_seed, design, temperature, version   as in TransformersEngine

    Prompts are token ids and no text is made. A version's prefix cache is its own: requests carry the number of swaps
    as their cache salt, so none is answered from keys and values of older weights, while answers in flight keep theirs.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        vocabulary: int,
        eos_token_ids: Sequence[int],
        sampling: SamplingConfig,
        run_seed: int,
        design: str | None = None,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        slots: int = 16,
        config: VllmEngineConfig | None = None,
        version: int = -1,
        transfers: bool = False,
        lora_rank: int = 0,
    ) -> None:
        settings: dict[str, Any] = {
            "vocabulary": vocabulary,
            "end_ids": list(eos_token_ids),
            "run_seed": run_seed,
            "design": design,
            "temperature": temperature,
        }
        self._sampler = AnswerSampler(sampling=sampling, **settings)
        settings["sampling"] = asdict(sampling)
        config = config or VllmEngineConfig()
        self._llm = _start(str(model), _DTYPES[dtype], slots, config, settings, transfers, lora_rank)
        self._applies_adapters = lora_rank > 0
        self._adapters: LoRARequest | None = None
        self._shapes = stored_shapes(Path(model))
        self._tied: bool = self._llm.model_config.hf_text_config.tie_word_embeddings
        self._max_context: int = self._llm.model_config.max_model_len
        self._version = version
        self._swaps = 0
        self._met: Rendezvous | None = None
        self._answers: dict[str, Answer] = {}
        self._ended: list[Rollout] = []
        self._llm.collective_rpc("set_version", args=(version,))

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from; -1 before the first load."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._answers) + len(self._ended)

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``; tokens sampled from now on carry that version.

        Answers in flight go on over the keys and values that older weights left. CheckpointError, before anything is
        changed, if the file does not fit the model; RolloutError if an answer in flight may only be generated by
        another version.
        """
        for answer in self._answers.values():
            check_version(answer.request, version)
        if self._applies_adapters:
            self._load_adapters(Path(directory))
        else:
            check_shapes(Path(directory), self._shapes, tied_head=self._tied)
            self._llm.collective_rpc("load_published", args=(str(directory),))
        self._moved(version)

    def receive_weights(self, offer: Offer) -> None:
        """Take the weights that the learner offers, otherwise as ``load_weights``.

        After a TransferError the engine holds two versions by halves and must not answer.
        """
        for answer in self._answers.values():
            check_version(answer.request, offer.version)
        offered = {spec.name: list(spec.shape) for spec in offer.specs}
        check_fit(offered, self._shapes, tied_head=self._tied, source=f"policy version {offer.version}")
        if self._met != offer.rendezvous:
            self._llm.collective_rpc("init_weight_transfer_engine", args=(asdict(offer.rendezvous),))
            self._met = offer.rendezvous
        specs = [(spec.name, spec.dtype, spec.shape) for spec in offer.specs]
        self._llm.collective_rpc("receive_published", args=({"specs": specs},))
        self._moved(offer.version)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; they start together at the next step. Errors as ``AnswerSampler.admit`` says."""
        admitted = self._sampler.admit(
            requests, list(self._answers.values()), version=self._version, max_context=self._max_context
        )
        for answer in admitted:
            self._begin(answer)

    def step(self) -> list[Rollout]:
        """Sample one token for every answer in flight; the answers that ended with it.

        RolloutError if the logits of an answer are not finite.
        """
        if self._answers:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost; uids that are not in flight are ignored."""
        lost = [uid for uid in uids if self._answers.pop(uid, None) is not None]
        self._llm.abort_request(lost)
        self._ended = [rollout for rollout in self._ended if rollout.uid not in set(uids)]

    def restart(self, keep_tokens: bool) -> None:
        """Compute the state of every answer in flight anew, or begin them anew."""
        if keep_tokens:
            self._llm.reset_prefix_cache(reset_running_requests=True)
            return
        answers = list(self._answers.values())
        self.abandon(list(self._answers))
        for answer in answers:
            answer.forget_tokens()
            self._begin(answer)

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Logprobs of each token after the first, asked of vLLM as the next token of as many prompts.

        Answers in flight advance meanwhile; those that end leave with the next step.
        """
        uids = [f"probe-{place}" for place in range(1, len(ids))]
        for place, uid in enumerate(uids, start=1):
            self._add(uid, ids[:place], 1, {"uid": uid, "probe": ids[place]})
        found: dict[str, float] = {}
        while len(found) < len(uids):
            found |= self._advance()
        return torch.tensor([found[uid] for uid in uids])

    def _load_adapters(self, directory: Path) -> None:
        check_adapters(directory, self._shapes)
        if self._adapters is None and self._answers:
            raise RolloutError(f"{len(self._answers)} answers were begun without adapters and would go on without them")
        named = {"lora_name": SETTINGS, "lora_int_id": 1, "lora_path": str(directory.absolute())}
        try:
            self._llm.add_lora(LoRARequest(**named, load_inplace=True))
        except (LoRAAdapterNotFoundError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"vLLM cannot apply the adapters in {directory}: {error}; set rollout.vllm.adapters to merge"
            ) from error
        # Answers in flight carry an earlier request of the same number, and go on with what is loaded under it.
        self._adapters = LoRARequest(**named)

    def _moved(self, version: int) -> None:
        self._llm.collective_rpc("set_version", args=(version,))
        self._version = version
        self._swaps += 1

    def _begin(self, answer: Answer) -> None:
        uid = answer.request.uid
        self._add(uid, answer.request.prompt_ids, self._sampler.max_new_tokens(answer.request), {"uid": uid})
        self._answers[uid] = answer

    def _add(self, uid: str, prompt_ids: Sequence[int], tokens: int, asked: dict[str, object]) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            stop_token_ids=list(self._sampler.end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={SETTINGS: asked},
        )
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": f"{self._swaps}"}
        try:
            self._llm.add_request(uid, prompt, params, lora_request=self._adapters)
        except VLLMValidationError as error:
            raise RequestRefusedError(f"{uid}: vLLM refuses the request: {error}") from error

    def _advance(self) -> dict[str, float]:
        """One step of vLLM; the drawn tokens go to their answers. What the probes that ended have found, by name."""
        outputs = self._llm.step()
        drawn: StepDraws = self._llm.collective_rpc("take_draws")[0]
        row_of = {uid: row for row, uid in enumerate(drawn.uids)}
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None or not output.outputs[0].token_ids:
                continue
            uid, row = output.request_id, row_of.get(output.request_id)
            tokens = list(output.outputs[0].token_ids)
            if row is None or drawn.draws is None or tokens != [drawn.draws.tokens[row]]:
                raise RolloutError(
                    f"{uid}: vLLM returned the tokens {tokens}, which are not the one that was drawn for it; "
                    "speculative decoding or another logits processor changes what is sampled: switch it off"
                )
            if drawn.positions[row] != len(answer.tokens):
                raise RolloutError(
                    f"{uid}: vLLM sampled position {drawn.positions[row]} and the answer has {len(answer.tokens)} "
                    "tokens; expected one token a step: switch asynchronous scheduling off"
                )
            self._sampler.append(answer, drawn.draws, row, self._version)
            finish = self._sampler.finish(answer)
            if finish is not None:
                self._ended.append(self._sampler.rollout(self._answers.pop(uid), finish))
        # A probe whose prompt is only half through has been read as well, at the wrong place.
        ended = {output.request_id for output in outputs if output.finished}
        return {uid: log_p for uid, log_p in drawn.probes.items() if uid in ended}


def _start(
    model: str,
    dtype: str,
    slots: int,
    config: VllmEngineConfig,
    settings: dict[str, Any],
    transfers: bool,
    lora_rank: int,
) -> LLMEngine:
    os.environ.update(_ENVIRONMENT)
    cpu = current_platform.is_cpu()
    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        # The model's own sampling defaults must not come in.
        generation_config="vllm",
        max_model_len=config.max_context or None,
        # One more for the probe of new weights, which must not wait until an answer ends.
        max_num_seqs=slots + 1,
        tensor_parallel_size=config.tensor_parallel,
        enforce_eager=config.eager or cpu,
        gpu_memory_utilization=config.memory_fraction,
        kv_cache_memory_bytes=round(config.kv_cache_gb * 2**30) if cpu else None,
        enable_prefix_caching=config.prefix_caching,
        async_scheduling=False,
        disable_log_stats=True,
        logits_processors=[f"{AnswerProcessor.__module__}:{AnswerProcessor.__qualname__}"],
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        weight_transfer_config=WeightTransferConfig(backend=SETTINGS) if transfers else None,
        additional_config={SETTINGS: settings},
        enable_lora=lora_rank > 0,
        max_lora_rank=next(rank for rank in LORA_RANKS if rank >= lora_rank),
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, RuntimeError) as error:
        merge = "; a model to which it applies no adapters takes rollout.vllm.adapters merge" if lora_rank else ""
        raise RolloutError(
            f"vLLM cannot run {model} (memory is rollout.vllm.kv_cache_gb on a CPU, rollout.vllm.memory_fraction on "
            f"GPUs; less is needed with a smaller rollout.vllm.max_context{merge}): {error}"
        ) from error
