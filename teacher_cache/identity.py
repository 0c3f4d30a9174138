"""Which teacher, exactly: what two sides must agree on before a score of one means anything to the other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from teacher_cache.errors import HandshakeError

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_CHUNK = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """What token ids mean.

    digest       hash of every (id, token) pair
    vocabulary   real token ids: one more than the largest
    special_ids  ids of the tokens that are marked special, whatever their role
    """

    digest: str
    vocabulary: int
    special_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherIdentity:
    """A teacher at one temperature.

    weights      hash of the weight files and the configuration
    dtype        of the forward pass, with whatever else changes the numbers, for example ``bf16`` or ``bf16+int8``
    max_context  longest prompt plus response, in tokens
    """

    weights: str
    dtype: str
    tokenizer: TokenizerIdentity
    temperature: float
    max_context: int

    @property
    def fingerprint(self) -> str:
        """Hash of all that a returned logprob depends on, besides the request."""
        parts = [self.weights, self.dtype, self.tokenizer.digest, self.tokenizer.vocabulary, self.temperature.hex()]
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON body."""
        return {
            "weights": self.weights,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer.digest,
            "vocabulary": self.tokenizer.vocabulary,
            "special_ids": list(self.tokenizer.special_ids),
            "temperature": self.temperature,
            "max_context": self.max_context,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TeacherIdentity":
        """What ``as_dict`` gave; HandshakeError for anything else."""
        try:
            return cls(
                weights=str(values["weights"]),
                dtype=str(values["dtype"]),
                tokenizer=TokenizerIdentity(
                    digest=str(values["tokenizer"]),
                    vocabulary=int(values["vocabulary"]),
                    special_ids=tuple(int(index) for index in values["special_ids"]),
                ),
                temperature=float(values["temperature"]),
                max_context=int(values["max_context"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise HandshakeError(
                f"the service's identity cannot be read ({error!r}); use one version on both"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a client needs the teacher to be; None is not stated.

    designs   specs that the teacher must know: those it draws itself, and those of the candidates it is sent
    """

    tokenizer: TokenizerIdentity | None = None
    temperature: float | None = None
    fingerprint: str | None = None
    draw: str | None = None
    designs: tuple[str, ...] = ()

    def differences(self, teacher: TeacherIdentity) -> list[str]:
        """What of the teacher is not as expected, in words; designs are checked by the service."""
        found = []
        if self.tokenizer is not None:
            mine, its = self.tokenizer, teacher.tokenizer
            if mine.vocabulary != its.vocabulary:
                found.append(f"vocabulary size: {mine.vocabulary} here, {its.vocabulary} at the teacher")
            if mine.digest != its.digest:
                found.append(f"tokenizer hash: {mine.digest} here, {its.digest} at the teacher")
            if mine.special_ids != its.special_ids:
                found.append(f"special ids: {list(mine.special_ids)} here, {list(its.special_ids)} at the teacher")
        if self.temperature is not None and self.temperature != teacher.temperature:
            found.append(f"temperature: {self.temperature} here, {teacher.temperature} at the teacher")
        if self.fingerprint is not None and self.fingerprint != teacher.fingerprint:
            found.append(f"fingerprint: {self.fingerprint} expected, {teacher.fingerprint} at the teacher")
        return found


def identify_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TokenizerIdentity:
    """The identity of a loaded tokenizer."""
    digest = blake2b(digest_size=16)
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    for index, token in pairs:
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    special = sorted(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return TokenizerIdentity(digest=digest.hexdigest(), vocabulary=vocabulary_of(tokenizer), special_ids=tuple(special))


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Real token ids: one more than the largest. ``len(tokenizer)`` is less where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def identify_checkpoint(path: Path, *, temperature: float, dtype: str) -> TeacherIdentity:
    """The identity of a checkpoint on disk; reads every weight file once, loads none.

    HandshakeError where the folder holds no weights.
    """
    config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
    return TeacherIdentity(
        weights=_hash_of_files(path),
        dtype=dtype,
        tokenizer=identify_tokenizer(AutoTokenizer.from_pretrained(path)),
        temperature=temperature,
        max_context=config.max_position_embeddings,
    )


def _hash_of_files(path: Path) -> str:
    weights = sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())
    if not weights:
        raise HandshakeError(f"{path} holds no weight files ({', '.join(_WEIGHTS)}); give an HF checkpoint's folder")
    digest = blake2b(digest_size=16)
    for file in (path / "config.json", *weights):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            yield chunk
