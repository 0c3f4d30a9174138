"""What runs inside vLLM's worker process: the draw of tokens and candidates, and the change of weights.

Both go through points that vLLM offers for it, a custom logits processor and a worker extension. The processor sees
every row's logits before temperature or any other processing, draws the token itself, exactly as the transformers
engine does, and leaves vLLM no other choice than that token: one code path decides what is sampled, what its
behaviour logprob is and which candidates go with it.

    logits ──> AnswerProcessor.apply ──> one token possible a row ──> vLLM's greedy choice
                      └── draws ──> WorkerExtension.take_draws ──> VllmEngine.step

Shape suffixes: B rows of vLLM's batch, V real vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from asyncopd.rollout.answers import AnswerSampler, Draws
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.weights import published_weights

SETTINGS = "asyncopd"
"""Key of vLLM's ``additional_config`` and of a request's ``extra_args``, and name of the transfer engine."""
WeightTransferEngineFactory.register_engine(SETTINGS, "asyncopd.rollout.vllm_transfer", "TransferReceiver")


@dataclass(frozen=True, slots=True)
class StepDraws:
    """What one step of vLLM drew: row i of ``draws`` is token ``positions[i]`` of the answer ``uids[i]``.

    probes    by the request's name, the logprob of the token that it asks about
    """

    uids: list[str]
    positions: list[int]
    draws: Draws | None
    probes: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in vLLM's batch; ``output_ids`` is vLLM's own list of what it has generated so far."""

    uid: str
    probe: int | None
    output_ids: Sequence[int]


class AnswerProcessor(LogitsProcessor):
    """Draws the next token of every row.

    A request's ``extra_args`` hold its uid and, for a probe, the one token whose logprob is wanted. A row whose prompt
    is not through yet is drawn as well, and again once it is: a draw depends on uid and position, so nothing is lost.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        settings = dict(vllm_config.additional_config[SETTINGS])
        self._sampler = AnswerSampler(sampling=SamplingConfig(**settings.pop("sampling")), **settings)
        self._rows: dict[int, _Row] = {}
        self._drawn = StepDraws([], [], None, {})
        self.version = -1

    def is_argmax_invariant(self) -> bool:
        """Applied to greedy rows too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows as vLLM adds, removes and moves them."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw for every row, and leave it its token alone."""
        logits_BV = logits[:, : self._sampler.vocabulary]
        answers = [index for index in sorted(self._rows) if self._rows[index].probe is None]
        chosen = {index: row.probe for index, row in self._rows.items() if row.probe is not None}
        probes = {}
        for index, token in chosen.items():
            probes[self._rows[index].uid] = float(torch.log_softmax(logits_BV[index], dim=-1)[token])
        uids = [self._rows[index].uid for index in answers]
        positions = [len(self._rows[index].output_ids) for index in answers]
        draws = None
        if answers:
            mine_BV = logits_BV if len(answers) == len(logits_BV) else logits_BV[answers]
            draws = self._sampler.draw(uids, positions, mine_BV, self.version)
            chosen |= dict(zip(answers, draws.tokens, strict=True))
        self._drawn = StepDraws(uids, positions, draws, probes)
        logits.fill_(-torch.inf)
        logits[list(chosen), list(chosen.values())] = 0.0
        return logits

    def take(self) -> StepDraws:
        """What the last step drew; the next call of ``apply`` replaces it."""
        return self._drawn


def _row(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Row:
    asked = params.extra_args[SETTINGS]
    return _Row(asked["uid"], asked.get("probe"), output_ids)


class WorkerExtension:
    """Methods of vLLM's worker that the engine calls by ``collective_rpc``."""

    model_config: Any
    model_runner: Any
    reload_weights: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def take_draws(self) -> StepDraws:
        """What the step that has just run drew."""
        return self._answer_processor().take()

    def load_published(self, directory: str) -> None:
        """Take the weights of a published version, which must fit the model."""
        # What cannot be read is found before vLLM begins, which empties the model first.
        weights = published_weights(Path(directory), Path(self.model_config.model))
        self.reload_weights(weights_iterator=weights)
        self._repack_heads()

    def receive_published(self, update: dict[str, object]) -> None:
        """Take the weights that the learner sends now. After an error the model is of no use."""
        self.start_weight_update()
        self.update_weights(update)
        self.finish_weight_update()
        self._repack_heads()

    def set_version(self, version: int) -> None:
        """The policy version that candidates drawn from now on come from."""
        self._answer_processor().version = version

    def _repack_heads(self) -> None:
        """On a CPU, vLLM multiplies by a packed copy of the head, and reloading packs a tied one not again."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu" and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _answer_processor(self) -> AnswerProcessor:
        processors = self.model_runner.input_batch.logitsprocs.non_argmax_invariant
        return next(processor for processor in processors if isinstance(processor, AnswerProcessor))
