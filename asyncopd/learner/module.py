"""The student as the learner sees it: micro-batch in, scaled loss and token statistics out.

One module holds body, head and objective, so that data parallel and sharded wrappers see a single forward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.learner.batching import MicroBatch
from asyncopd.learner.head import HeadShape, fused_loss
from asyncopd.learner.selected import selected_logprobs
from asyncopd.objectives import Objective, StepContext


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchLoss:
    """What a forward gives.

    loss        scalar, already scaled so that the sum over micro-batches is the step's loss
    metrics     per-token values [T], detached, by name
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class StudentModule(nn.Module):
    """A causal language model whose forward returns the objective's loss."""

    def __init__(self, model: PreTrainedModel, objective: Objective, shape: HeadShape) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.shape = shape

    def forward(self, micro: MicroBatch, scale_T: Tensor, context: StepContext | None = None) -> MicroBatchLoss:
        """Loss of one micro-batch; ``scale_T`` is the reduction's weight of each token."""
        hidden_TH = self._states(micro)
        parts: list[dict[str, Tensor]] = []

        def chunk_loss(rows: slice, log_p_tC: Tensor) -> Tensor:
            tokens = micro.tokens(rows, log_p_tC)
            loss_t, metrics = self.objective.token_losses(tokens, None if context is None else context.slice(rows))
            gap_t = (tokens.log_p_T.detach() - tokens.log_b_T).abs()
            parts.append({"loss": loss_t.detach(), "logprob_gap": gap_t, **metrics})
            return (loss_t * scale_T[rows]).sum()

        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = self.model.get_output_embeddings()
            fused = fused_loss(hidden_TH, head.weight, head.bias, micro.ids_TC, self.shape, chunk_loss, entropy=True)
        metrics = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        if fused.entropy_T is not None:
            metrics["entropy"] = fused.entropy_T
        return MicroBatchLoss(loss=fused.loss, metrics=metrics)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Logprobs (nats) [T, C] at the micro-batch's ids under the current weights, without gradient."""
        hidden_TH = self._states(micro)
        ids_TC = micro.ids_TC
        if ids_TC is None:
            ids_TC = torch.arange(self.shape.vocabulary, device=hidden_TH.device).expand(len(hidden_TH), -1)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = self.model.get_output_embeddings()
            return selected_logprobs(hidden_TH, head.weight, head.bias, ids_TC, self.shape).log_p_TC

    def _states(self, micro: MicroBatch) -> Tensor:
        """Hidden states [T, H] that predict the valid response tokens."""
        output = self.model.base_model(
            input_ids=micro.input_ids_NL,
            attention_mask=micro.attention_mask_NL,
            position_ids=micro.position_ids_NL,
            use_cache=False,
        )
        return output.last_hidden_state.flatten(0, 1)[micro.state_T]


def check_head(model: PreTrainedModel, shape: HeadShape) -> None:
    """Compare the fused head with the model's own logits on a few tokens.

    ConfigError where they differ: the model does something to its logits that the fused head does not know, and
    training through it would be wrong without a sign.
    """
    probe = torch.arange(1, 9)[None].to(next(model.parameters()).device) % shape.vocabulary
    plain = HeadShape(vocabulary=shape.vocabulary, logit_scale=shape.logit_scale, softcap=shape.softcap)
    head = model.get_output_embeddings()
    with torch.no_grad():
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state[0]
        own = model(input_ids=probe, use_cache=False).logits[0].float()[:, : shape.vocabulary].log_softmax(-1)
        every = torch.arange(shape.vocabulary, device=probe.device).expand(len(hidden), -1)
        ours = selected_logprobs(hidden, head.weight, head.bias, every, plain).log_p_TC
    worst = (own - ours).abs().max().item()
    if not worst < 1e-2:
        raise ConfigError(
            f"the student's own logits differ from hidden states times head by {worst:.3g} nats (expected < 0.01): "
            f"{type(model).__name__} transforms its logits in a way the fused head does not know; "
            "report the model type, or use another student"
        )
