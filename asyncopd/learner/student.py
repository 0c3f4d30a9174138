"""What is done to the student before it is trained: what stands still, what is recomputed, what is compiled."""

from transformers import PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.learner.adapters import add_adapters
from asyncopd.learner.sharding import body_layers
from asyncopd.learner.step import LearnerConfig


def prepare_student(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Freeze, put adapters in, switch recomputation and compilation on, all in place and in this order."""
    if config.lora.rank:
        add_adapters(model, config.lora)
    else:
        _freeze(model, embeddings=config.freeze_embeddings, head=config.freeze_head)
    if config.gradient_checkpointing:
        # Not the reentrant form: it does not tell which weights were used where some of them stand still.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        for layer in body_layers(model):
            # Layer by layer: they share one compiled program, and names and wrappers stay as they are.
            layer.compile(dynamic=True)


def _freeze(model: PreTrainedModel, *, embeddings: bool, head: bool) -> None:
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied and embeddings != head:
        one, other = ("embeddings", "head") if embeddings else ("head", "embeddings")
        raise ConfigError(
            f"learner.freeze_{one} is true and learner.freeze_{other} is false, but this student's are one "
            "tensor; set both alike"
        )
    if embeddings:
        model.get_input_embeddings().requires_grad_(False)
    if head:
        model.get_output_embeddings().requires_grad_(False)
