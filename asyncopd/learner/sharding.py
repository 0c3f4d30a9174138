"""The student over several learner processes: replicated, or spread by FSDP2.

Under FSDP2 each decoder layer is a unit that is gathered while it runs. What is left (embeddings, last norm, head) is
the root unit, gathered from the start of the forward to the end of the backward, since the fused head reads the head's
weight inside the student's own forward. ``torch.distributed.fsdp.fully_shard`` does it on GPUs and on CPUs alike;
accelerate's own FSDP2 would silently turn into plain data parallel on a CPU.
"""

import logging

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncopd.errors import ConfigError

LOG = logging.getLogger(__name__)
SHARDINGS = ("none", "fsdp2")


def distributed(module: nn.Module, sharding: str, accelerator: Accelerator) -> nn.Module:
    """``module`` on this rank's device, its gradients averaged over the ranks; ``module.model`` is the student.

    Sharded where ``sharding`` is ``fsdp2`` or accelerate was started with an FSDP2 config. A single process has nothing
    to shard. ConfigError where sharding was asked for and cannot be had.
    """
    asked = sharding == "fsdp2" or accelerator.distributed_type == DistributedType.FSDP
    if asked and accelerator.num_processes > 1:
        return _sharded(module, accelerator)
    if asked:
        LOG.info("one learner process: there is nothing to shard")
    return accelerator.prepare_model(module)


def is_sharded(module: nn.Module) -> bool:
    """Whether the parameters are spread over the ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def body_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers; ConfigError where the model does not say which modules they are."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} names no layers of its own (_no_split_modules is {sorted(names)}); "
            "set learner.sharding to none and learner.compile to false"
        )
    return layers


def _sharded(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    reshard = reshard_after_forward(accelerator)
    for layer in body_layers(module.model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    # The root's weights would be gathered again at once for the backward, so they stay.
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(module, "logprobs")
    plain = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ConfigError(
            f"learner.sharding is fsdp2, but {len(plain)} parameters were not sharded ({', '.join(plain[:3])}, ...); "
            "set learner.sharding to none, and report the model type"
        )
    return module


def reshard_after_forward(accelerator: Accelerator) -> bool:
    """Whether a layer's weights are let go between forward and backward: yes, unless an accelerate FSDP config says no.

    ConfigError for what such a config asks for and is not served.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return True
    plugin = accelerator.state.fsdp_plugin
    remedies = {
        "fsdp_version 1": (plugin.fsdp_version != 2, "say fsdp_version: 2"),
        "fsdp_offload_params": (
            isinstance(plugin.cpu_offload, torch.distributed.fsdp.CPUOffloadPolicy),
            "say fsdp_offload_params: false",
        ),
        "fsdp_activation_checkpointing": (
            plugin.activation_checkpointing,
            "say false there, and learner.gradient_checkpointing true",
        ),
    }
    for asked, (refused, remedy) in remedies.items():
        if refused:
            raise ConfigError(f"the accelerate config asks for {asked}, which the learner does not serve; {remedy}")
    return bool(plugin.reshard_after_forward)
