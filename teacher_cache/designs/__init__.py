"""Support designs by name. A new design is one file, one line in ``DESIGNS``, and one test."""

import re
from dataclasses import fields
from difflib import get_close_matches

from teacher_cache.designs.candidates import draw_candidates
from teacher_cache.designs.design import Draw, SupportDesign, ThinningDesign
from teacher_cache.designs.full import Full
from teacher_cache.designs.gumbel import Gumbel
from teacher_cache.designs.head_tail import HeadTail
from teacher_cache.designs.multi_sample import MultiSample
from teacher_cache.designs.sampled import Sampled
from teacher_cache.designs.systematic import Systematic
from teacher_cache.designs.top_k import TopK
from teacher_cache.designs.top_k_tail import TopKTail
from teacher_cache.designs.two_phase import TwoPhase
from teacher_cache.designs.two_phase_centred import TwoPhaseCentred
from teacher_cache.errors import DesignError

__all__ = ["DESIGNS", "Draw", "SupportDesign", "ThinningDesign", "draw_candidates", "parse_design"]

DESIGNS = {
    "full": Full,
    "gumbel": Gumbel,
    "head_tail": HeadTail,
    "multi_sample": MultiSample,
    "sampled": Sampled,
    "systematic": Systematic,
    "top_k": TopK,
    "top_k_tail": TopKTail,
    "two_phase": TwoPhase,
    "two_phase_centred": TwoPhaseCentred,
}

_SPEC = re.compile(r"\s*(\w+)\s*(?:\(\s*(\d+(?:\s*,\s*\d+)*)?\s*\))?\s*")


def parse_design(spec: str) -> SupportDesign:
    """The design that a spec such as ``systematic(16)`` or ``head_tail(8, 4)`` names; DesignError if there is none."""
    match = _SPEC.fullmatch(spec)
    name = match.group(1) if match else re.split(r"\W", spec.strip(), maxsplit=1)[0]
    if name not in DESIGNS:
        near = get_close_matches(name, DESIGNS, n=1, cutoff=0.0)
        raise DesignError(f"no support design {spec!r}; did you mean {_form(near[0])}? There are {', '.join(DESIGNS)}")
    numbers = [int(text) for text in re.findall(r"\d+", match.group(2) or "")] if match else []
    if match is None or len(numbers) != len(fields(DESIGNS[name])):
        raise DesignError(f"{spec!r} is not a spec of {name}; write {_form(name)}, with whole numbers")
    return DESIGNS[name](*numbers)


def _form(name: str) -> str:
    """The valid form of a spec, for error messages."""
    numbers = ", ".join(field.name for field in fields(DESIGNS[name]))
    return f"{name}({numbers})" if numbers else name
