"""A mixture of forward and reverse KL, each on the candidates that suit it."""

from dataclasses import dataclass
from typing import ClassVar

from asyncopd.errors import ConfigError
from asyncopd.objectives.divergences.divergence import Divergence
from asyncopd.objectives.divergences.forward_kl import ForwardKL
from asyncopd.objectives.divergences.reverse_kl import ReverseKL


@dataclass(frozen=True, slots=True)
class Mixed:
    """``mix*forward_kl + (1-mix)*reverse_kl`` with ``0 < mix < 1``: teacher-drawn and student-drawn candidates."""

    mix: float = 0.5
    name: ClassVar[str] = "mixed"

    def __post_init__(self) -> None:
        if not 0.0 < self.mix < 1.0:
            raise ConfigError(f"mix is {self.mix}; mixed needs 0 < mix < 1: use reverse_kl for 0 and forward_kl for 1")

    @property
    def parts(self) -> tuple[tuple[float, Divergence], ...]:
        """Share and divergence of each part."""
        return (self.mix, ForwardKL()), (1.0 - self.mix, ReverseKL())
