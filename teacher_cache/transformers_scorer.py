"""Teacher records from a transformers model."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from teacher_cache.causal_head import CausalHead
from teacher_cache.causal_scorer import CausalScorer


class TransformersScorer(CausalScorer):
    """A Scorer over one model in this process.

    model          a loaded causal language model (quantised, compiled or spread over devices as its owner likes),
                   or the directory of one
    vocabulary     real token ids of the tokenizer; head rows beyond them take no mass
    device_map     spreads a model that is given as a directory over devices, ``auto`` for example; else ``device``
    compiled       puts the body through torch.compile

    The rest is as for CausalScorer.
    """

    def __init__(
        self,
        model: PreTrainedModel | Path | str,
        *,
        vocabulary: int,
        temperature: float = 1.0,
        batch_tokens: int = 4096,
        teacher: str = "default",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        device_map: str | None = None,
        compiled: bool = False,
    ) -> None:
        if isinstance(model, (str, Path)):
            # A checkpoint that was saved quantised says so in its config and is loaded as such.
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device_map)
            model = loaded if device_map is not None else loaded.to(device)
        if compiled:
            model.get_decoder().compile(dynamic=True)
        super().__init__(
            CausalHead(model.eval(), vocabulary), temperature=temperature, batch_tokens=batch_tokens, teacher=teacher
        )
