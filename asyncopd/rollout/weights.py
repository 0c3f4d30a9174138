"""Published weights into a live model, in place."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from asyncopd.errors import CheckpointError
from asyncopd.publish.adapters import adapted_shapes, holds_adapters, merged_weights_of

FILE_NAME = "model.safetensors"


@torch.no_grad()
def load_weights_into(model: PreTrainedModel, directory: Path) -> None:
    """Copy a published version into the model's own tensors, cast to their dtype.

    All of the model's tensors must be in ``directory/model.safetensors`` and nothing else may be, so a half-written or
    foreign checkpoint cannot be mistaken for an update. Tied tensors may come under any or all of their names, with one
    value. Of adapters alone, which belong to the checkpoint that the model was loaded from, the weights that have one
    are written, and the others left as they are.
    CheckpointError otherwise, before anything is copied.
    """
    own = model.state_dict(keep_vars=True)
    if holds_adapters(directory):
        check_adapters(directory, {name: list(tensor.shape) for name, tensor in own.items()})
        update: Iterable[tuple[str, torch.Tensor]] = merged_weights_of(
            directory, Path(model.name_or_path), model.device
        )
    else:
        update = _whole_update(Path(directory) / FILE_NAME, model, own).items()
    for name, tensor in update:
        own[name].copy_(tensor)


def _whole_update(path: Path, model: PreTrainedModel, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            missing = [names[0] for names in names_of.values() if not stored.intersection(names)]
            if missing or stored - own.keys():
                raise CheckpointError(
                    f"{path} does not fit {type(model).__name__}: missing {_some(missing)}, "
                    f"unexpected {_some(sorted(stored - own.keys()))}; publish weights of the model that rolls out"
                )
            update = {name: file.get_tensor(name) for name in sorted(stored)}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; was that version published whole?") from error
    _check_values(path, own, update, names_of)
    return update


def published_weights(directory: Path, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of all weights of a published version, adapters merged; what cannot be read is found now.

    checkpoint   the folder that the model was loaded from, which adapters belong to
    """
    if not holds_adapters(directory):
        return iter(load_file(Path(directory) / FILE_NAME).items())
    merged = merged_weights_of(directory, checkpoint, others=True)
    return chain([next(merged)], merged)


def stored_shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes of all tensors of a checkpoint's safetensors files, by name; CheckpointError if there is none."""
    shapes: dict[str, list[int]] = {}
    try:
        for path in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; was that version published whole?") from error
    if not shapes:
        raise CheckpointError(f"cannot read {directory}: it holds no safetensors file; was that version published?")
    return shapes


def check_shapes(directory: Path, own: dict[str, list[int]], *, tied_head: bool) -> None:
    """CheckpointError where a published version does not fit the tensors that an engine's model was loaded from.

    tied_head   the head is the embedding, so it may be in neither, in both or in one of them
    """
    if holds_adapters(directory):
        check_adapters(directory, own)
    else:
        check_fit(stored_shapes(directory), own, tied_head=tied_head, source=str(directory))


def check_adapters(directory: Path, own: dict[str, list[int]]) -> None:
    """CheckpointError where adapters cannot be read, or do not fit the tensors that a model was loaded from."""
    for name, shape in adapted_shapes(directory).items():
        if shape != own.get(name):
            raise CheckpointError(
                f"{directory} has an adapter for {name} of shape {tuple(shape)}, which the model "
                f"{'has as ' + str(tuple(own[name])) if name in own else 'does not have'}; "
                "publish adapters of the model that rolls out"
            )


def check_fit(stored: dict[str, list[int]], own: dict[str, list[int]], *, tied_head: bool, source: str) -> None:
    """The same for weights from anywhere; ``source`` is what the message calls them."""
    optional = {"lm_head.weight"} if tied_head else set()
    missing, unexpected = own.keys() - stored.keys() - optional, stored.keys() - own.keys() - optional
    if missing or unexpected:
        raise CheckpointError(
            f"{source} does not fit the model: missing {_some(sorted(missing))}, "
            f"unexpected {_some(sorted(unexpected))}; publish weights of the model that rolls out"
        )
    for name, shape in stored.items():
        if shape != own.get(name, shape):
            raise CheckpointError(f"{source}: {name} has shape {tuple(shape)}; the model's has {tuple(own[name])}")


def _check_values(
    path: Path, own: dict[str, torch.Tensor], update: dict[str, torch.Tensor], names_of: dict[int, list[str]]
) -> None:
    for name, tensor in update.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}; the model's has {tuple(own[name].shape)}"
            )
    for names in names_of.values():
        given = [name for name in names if name in update]
        for name in given[1:]:
            if not torch.equal(update[name], update[given[0]]):
                raise CheckpointError(f"{path}: {given[0]} and {name} are tied in the model but differ in the file")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "nothing"
