"""A causal language model in two halves: the body once, the head only where logits are wanted.

Shape suffixes: N sequences, L positions, R rows (positions at which logits are wanted), H hidden size,
V real vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from teacher_cache.errors import ScoringError
from teacher_cache.logit_rows import LogitRows, normalised

HEAD_ROWS = 128
"""Rows that go through the head at once: enough for an efficient product, few enough to be small."""

CPU_ROWS = 16
"""Rows normalised at once on a CPU: few enough that several float32 passes over them stay in the processor's cache."""


def logit_transform(model: PreTrainedConfig) -> tuple[float, float | None]:
    """What a model does to its logits: a factor, then a soft-cap (``cap * tanh(logits / cap)``) or None.

    Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``, Gemma caps.
    """
    known = model.get_text_config(decoder=True).to_dict()
    factor = float(known.get("logit_scale") or 1.0) / float(known.get("logits_scaling") or 1.0)
    return factor, known.get("final_logit_softcapping")


class LogitHead:
    """Exact distributions from final hidden states, without ever holding [tokens, vocabulary].

    project      hidden states [R, H] to the head's own logits [R, head rows]
    config       of the model: its scale, soft-cap and context
    vocabulary   real token ids; head rows beyond them are left out
    """

    def __init__(self, project: Callable[[Tensor], Tensor], config: PreTrainedConfig, vocabulary: int) -> None:
        text = config.get_text_config(decoder=True)
        self._project = project
        self._scale, self._softcap = logit_transform(text)
        self.max_context: int = text.max_position_embeddings
        self.vocabulary = vocabulary
        if not 0 < vocabulary <= text.vocab_size:
            raise ScoringError(
                f"vocabulary is {vocabulary}; the model's head has {text.vocab_size} rows: "
                "give vocabulary_of(tokenizer)"
            )

    @torch.no_grad()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] in the model's dtype, scaled and soft-capped, before any temperature."""
        logits_RV = self._project(hidden_RH)[:, : self.vocabulary]
        if self._scale != 1:
            logits_RV = logits_RV * self._scale
        if self._softcap is not None:
            logits_RV = torch.tanh(logits_RV / self._softcap) * self._softcap
        return logits_RV

    def distributions(self, hidden_RH: Tensor, temperature: float, rows: int | None = None) -> Iterator[LogitRows]:
        """Distributions at the rows in order, ``rows`` at a time; None: as many as suit the device."""
        for first in range(0, len(hidden_RH), HEAD_ROWS):
            logits_RV = self.logits(hidden_RH[first : first + HEAD_ROWS])
            size = rows or (CPU_ROWS if logits_RV.device.type == "cpu" else HEAD_ROWS)
            for offset in range(0, len(logits_RV), size):
                yield normalised(logits_RV[offset : offset + size], temperature, first=first + offset)


class CausalHead(LogitHead):
    """A transformers model: its body, and its head where logits are wanted.

    vocabulary   real token ids; head rows beyond them are left out

    ScoringError if body, head, scale and soft-cap as this class knows them do not give the model's own logits.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self._model = model
        super().__init__(lambda hidden_RH: model.get_output_embeddings()(hidden_RH), model.config, vocabulary)
        self._check()

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states [N, L, H] of token sequences, padded on the right.

        Causal attention never looks to the right, so the padding needs no mask and changes nothing.
        """
        longest = max(len(sequence) for sequence in sequences)
        ids_NL = torch.zeros((len(sequences), longest), dtype=torch.int64)
        for row, sequence in zip(ids_NL, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        body = self._model.get_decoder()
        return body(input_ids=ids_NL.to(self._model.device), use_cache=False).last_hidden_state

    @torch.no_grad()
    def _check(self) -> None:
        """An architecture that does something else to its logits must not be scored wrongly in silence."""
        probe = [0, min(1, self.vocabulary - 1)]
        own_RV = self.logits(self.hidden([probe])[0]).float()
        ids = torch.tensor([probe], device=self._model.device)
        given_RV = self._model(input_ids=ids, use_cache=False).logits[0, :, : self.vocabulary].float()
        apart = float((own_RV - given_RV).abs().max())
        if not apart <= 1e-3 * float(given_RV.abs().max()):
            raise ScoringError(
                f"the logits of {type(self._model).__name__} are not head(body(tokens)) with its config's scale and "
                f"soft-cap (they differ by {apart:.3g}); teach CausalHead what this architecture does to them"
            )
