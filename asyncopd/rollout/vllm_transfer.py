"""A weight-transfer engine of vLLM, by its own extension point: gloo or NCCL, with a deadline on every wait.

vLLM's engine for NCCL waits without a deadline for a trainer that may have died, and needs CUDA even to be tried.
This one differs from it in the group alone; start, update and finish are vLLM's protocol, layer by layer.
"""

from dataclasses import asdict, dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncopd.errors import TransferError
from asyncopd.publish.transfer_group import Rendezvous, TensorSpec, TransferGroup


@dataclass(slots=True)
class Init(WeightTransferInitInfo):
    """A rendezvous, as vLLM passes it on: by its fields."""

    backend: str
    port: int
    size: int
    deadline_s: float
    chunk_bytes: int


@dataclass(slots=True)
class Update(WeightTransferUpdateInfo):
    """Name, dtype and shape of each tensor of a version."""

    specs: list[tuple[str, str, tuple[int, ...]]]


class TransferReceiver(WeightTransferEngine[Init, Update]):
    """What each process of a vLLM engine does in a transfer."""

    init_info_cls = Init
    update_info_cls = Update
    _group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        """Meet the learner."""
        rank = 1 + self.parallel_config.rank
        self._group = TransferGroup(Rendezvous(**asdict(init_info)), rank, self.device)

    def start_weight_update(self) -> None:
        """Have each layer processed again once it is complete."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """All tensors of a version; TransferError where they do not all come."""
        self.receive_weights(self.parse_update_info(update_info))
        # vLLM's own waits for an accelerator even where there is none.
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """As ``update_weights``."""
        if self._group is None:
            raise TransferError("weights were announced before the learner was met")
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in update_info.specs]
        try:
            with disable_mtp_completeness_check():
                self._group.receive(specs, self.model.load_weights)
        except TransferError:
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Process what is left."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
            self._group = None
