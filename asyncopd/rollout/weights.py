"""Published weights into a live model, in place."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from asyncopd.errors import CheckpointError

FILE_NAME = "model.safetensors"


@torch.no_grad()
def load_weights_into(model: PreTrainedModel, directory: Path) -> None:
    """Copy ``directory/model.safetensors`` into the model's own tensors, cast to their dtype.

    All of the model's tensors must be in the file and nothing else may be, so a half-written or foreign checkpoint
    cannot be mistaken for an update. Tied tensors may come under any or all of their names, with one value.
    CheckpointError otherwise, before anything is copied.
    """
    path = Path(directory) / FILE_NAME
    own = model.state_dict(keep_vars=True)
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
    for name, tensor in update.items():
        own[name].copy_(tensor)


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
    """CheckpointError where published weights do not have the tensors that an engine's model was loaded from.

    tied_head   the head is the embedding, so it may be in neither, in both or in one of them
    """
    check_fit(stored_shapes(directory), own, tied_head=tied_head, source=str(directory))


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
