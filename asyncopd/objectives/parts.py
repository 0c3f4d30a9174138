"""Which origin, linear term and centring go together, and what is refused.

The rules are those of OBJECTIVES, section 1; every refusal gives the value, the reason and the remedy.
"""

import math

from asyncopd.errors import ConfigError
from asyncopd.objectives.centring import Centring
from asyncopd.objectives.divergences import Divergence
from asyncopd.objectives.sparse import Form, SparseDivergence
from teacher_cache.designs import SupportDesign
from teacher_cache.record import Origin

HAJEK_BUDGET = 4
"""Fewest candidates for ``hajek``: its bias is 100%, 8% and 1% at 1, 2 and 3."""


def resolve_part(
    divergence: Divergence,
    design: SupportDesign,
    *,
    origin: str,
    form: str,
    centring: str,
    truncate: float | None,
    allow_unbounded: bool,
) -> SparseDivergence:
    """The estimator that these settings name, every ``auto`` resolved; ConfigError where they make no sense."""
    chosen = _origin(divergence, design, origin, allow_unbounded)
    if truncate is not None and (
        chosen != "student" or design.spec.partition("(")[0] not in ("multi_sample", "sampled")
    ):
        raise ConfigError(
            f"truncate is {truncate} with {chosen}-drawn {design.spec}; it caps p/g, which only student-drawn "
            "multi_sample and sampled records hold: leave it out, or use design multi_sample(64)"
        )
    resolved = _form(divergence, design, chosen, form)
    slope = {"bregman": divergence.slope_at_one, "bounded": divergence.slope_at_infinity, "plain": 0.0}[resolved]
    return SparseDivergence(
        divergence=divergence,
        origin=chosen,
        design=design,
        form=resolved,
        linear=slope,
        centring=_centring(divergence, design, chosen, centring),
        truncate=truncate,
    )


def is_exact_or_biased(design: SupportDesign) -> bool:
    """Whether the weights are constants: nothing is drawn, so there is no variance to reduce and none to explode."""
    return not design.unbiased or design.budget == 0


def _origin(divergence: Divergence, design: SupportDesign, origin: str, allow_unbounded: bool) -> Origin:
    if design.budget == 0 and origin == "auto":
        return "teacher"  # the scorer makes the ids where it makes the scores; a student would have to ship them
    chosen: Origin = divergence.origin
    if origin in ("student", "teacher"):
        chosen = "student" if origin == "student" else "teacher"
    if design.thins and chosen == "teacher":
        raise ConfigError(
            f"{design.spec} with teacher-drawn candidates; its second phase compares the proposal with the teacher, "
            "which are the same here: use systematic, or origin student"
        )
    unbounded = math.isinf(divergence.slope_at_infinity) and chosen == "teacher" and not is_exact_or_biased(design)
    if unbounded and not allow_unbounded:
        raise ConfigError(
            f"{divergence.name} on teacher-drawn {design.spec}: its weighted terms have no bound, and their error is "
            "hundreds of times the gradient; use origin student, or set allow_unbounded for an experiment"
        )
    return chosen


def _form(divergence: Divergence, design: SupportDesign, origin: Origin, form: str) -> Form:
    if form == "auto":
        bregman = origin == "student" or is_exact_or_biased(design) or math.isinf(divergence.slope_at_infinity)
        return "bregman" if bregman else "bounded"
    if form == "bounded":
        if math.isinf(divergence.slope_at_infinity):
            raise ConfigError(f"form bounded with {divergence.name}: no linear term bounds it; use bregman or plain")
        return "bounded"
    return "bregman" if form == "bregman" else "plain"


def _centring(divergence: Divergence, design: SupportDesign, origin: Origin, centring: str) -> Centring:
    reverse, constant = divergence.name == "reverse_kl", is_exact_or_biased(design)
    if centring == "auto":
        fits = reverse and origin == "student" and not constant and design.budget >= HAJEK_BUDGET
        return "hajek" if fits else "none"
    if centring == "none":
        return "none"
    if not reverse or constant:
        raise ConfigError(
            f"centring {centring} with {divergence.name} and {design.spec}; it reduces the variance of reverse_kl on "
            "drawn candidates and means nothing elsewhere: leave it at auto"
        )
    if centring == "hajek":
        if design.budget < HAJEK_BUDGET:
            raise ConfigError(
                f"hajek centring with {design.spec}; it is badly biased under {HAJEK_BUDGET} candidates: "
                "use centring mean, or a larger budget"
            )
        return "hajek"
    if centring == "leave_one_out":
        if not design.spec.startswith("multi_sample") or design.budget < 2:
            raise ConfigError(
                f"leave_one_out centring with {design.spec}; it needs independent draws: use multi_sample(2) or more, "
                "or centring hajek"
            )
        return "leave_one_out"
    return "mean"
