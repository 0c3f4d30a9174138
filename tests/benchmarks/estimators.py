"""Gradient error of every sparse estimator on a real pair of models, against the dense gradient.

    python -m tests.benchmarks.estimators --json            # the rows, on standard output
    python -m tests.benchmarks.estimators --figure docs/figures/estimators.png

The teacher is a real checkpoint; the student is the same model with noise on every matrix (5% of its standard deviation
is "near", 25% is "far"). Positions come from text that the teacher samples (``--writer student``: the student does). A
stale proposal is the student with Gaussian noise of 0.3 on its logits. What is measured, with the library's own designs
and losses, is the relative mean squared error of the logit gradient, ``sum_t E|g_t - dense_t|^2 / sum_t |dense_t|^2``.

Shape suffixes: T positions, C candidates, V vocabulary, N bootstrap resamples.
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncopd.objectives import Candidates, Objective, ObjectiveConfig, Tokens, build_objective
from asyncopd.objectives.resolution import parts
from teacher_cache.designs import Draw, ThinningDesign
from teacher_cache.noise import Noise

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What is 17 * 23? Think step by step.",
    "Give three tips for learning a language.",
    "Summarise the causes of the First World War.",
    "Write a Python function that reverses a list.",
    "Describe how bread is made.",
    "What would you pack for a week in the mountains?",
)
TOKENS_EACH = 48
PAIRS = {"near": 0.05, "far": 0.25}
STALE_NOISE = 0.3
BUDGETS = (4, 8, 16, 32, 64)
BYTES_A_CANDIDATE = 12
"""int32 id, float32 weight, float32 teacher logprob: what a record keeps."""

ESTIMATORS = (
    # direction, design with its budget left open, centring, form
    ("reverse", "multi_sample({})", "none", "auto"),
    ("reverse", "gumbel({})", "none", "auto"),
    ("reverse", "systematic({})", "none", "auto"),
    ("reverse", "systematic({})", "mean", "auto"),
    ("reverse", "systematic({})", "hajek", "auto"),
    ("reverse", "two_phase(128,{})", "none", "auto"),
    ("reverse", "two_phase(128,{})", "mean", "auto"),
    ("reverse", "two_phase_centred(128,{})", "mean", "auto"),
    ("reverse", "two_phase_centred(128,{})", "hajek", "auto"),
    ("reverse", "top_k({})", "none", "bregman"),
    ("reverse", "top_k({})", "none", "plain"),
    ("reverse", "top_k_tail({})", "none", "auto"),
    ("forward", "multi_sample({})", "none", "auto"),
    ("forward", "gumbel({})", "none", "auto"),
    ("forward", "systematic({})", "none", "auto"),
    ("forward", "top_k({})", "none", "bregman"),
    ("forward", "top_k_tail({})", "none", "auto"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One point of the figure. ``unbiased`` is False for hajek centring too, whose bias is small but not zero."""

    direction: str
    design: str
    centring: str
    origin: str
    form: str
    unbiased: bool
    budget: int
    pair: str
    stale: bool
    rel_mse: float
    rel_mse_ci: tuple[float, float]
    bytes_per_token: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Logprobs at every position, float64, and which answer each belongs to."""

    name: str
    log_p_TV: Tensor
    log_q_TV: Tensor
    log_b_TV: Tensor
    sequence_T: Tensor

    def dense(self, direction: str) -> Tensor:
        """The dense logit gradient [T, V]."""
        p_TV = self.log_p_TV.exp()
        if direction == "forward":
            return p_TV - self.log_q_TV.exp()
        apart_TV = self.log_p_TV - self.log_q_TV
        return p_TV * (apart_TV - (p_TV * apart_TV).sum(-1, keepdim=True))


def load_pair(teacher: PreTrainedModel, prompts: list[Tensor], name: str, writer: str, seed: int) -> Pair:
    """A perturbed student, text that it or the teacher samples, and both models' logits on it."""
    generator = torch.Generator().manual_seed(seed)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for weight in student.parameters():
            if weight.dim() == 2:
                weight.add_(PAIRS[name] * weight.std() * torch.randn(weight.shape, generator=generator))
    student_rows, teacher_rows = [], []
    torch.manual_seed(seed)
    for prompt in prompts:
        with torch.inference_mode():
            text = (student if writer == "student" else teacher).generate(
                prompt, max_new_tokens=TOKENS_EACH, min_new_tokens=TOKENS_EACH, do_sample=True, top_k=0, pad_token_id=0
            )
            rows = slice(prompt.shape[1] - 1, -1)
            student_rows.append(student(text).logits[0, rows].double().log_softmax(-1))
            teacher_rows.append(teacher(text).logits[0, rows].double().log_softmax(-1))
    log_p_TV, log_q_TV = torch.cat(student_rows).clone(), torch.cat(teacher_rows).clone()
    noise_TV = torch.randn(log_p_TV.shape, generator=generator, dtype=torch.float64)
    return Pair(
        name=name,
        log_p_TV=log_p_TV,
        log_q_TV=log_q_TV,
        log_b_TV=(log_p_TV + STALE_NOISE * noise_TV).log_softmax(-1),
        sequence_T=torch.arange(len(prompts)).repeat_interleave(TOKENS_EACH),
    )


def objective_of(direction: str, design: str, centring: str, form: str) -> Objective:
    """The library's objective; forward KL takes teacher-drawn candidates, reverse KL student-drawn ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_objective(
            ObjectiveConfig(name=f"{direction}_kl", design=design, centring=centring, form=form)  # type: ignore[arg-type]
        )


def candidates_of(objective: Objective, pair: Pair, log_g_TV: Tensor, noise: Noise) -> tuple[Tensor, Candidates]:
    """One draw, thinned where the design thins; ``log_g_TV`` is float32, as an engine's is."""
    ((origin, design),) = objective.draws.items()
    draw = design.draw(log_g_TV, noise, None)
    if isinstance(design, ThinningDesign) and origin == "student":
        draw, _ = design.thin(
            ids_TC=draw.ids_TC,
            log_w_TC=draw.log_w_TC,
            log_g_TC=log_g_TV.gather(1, draw.ids_TC),
            log_q_TC=pair.log_q_TV.gather(1, draw.ids_TC),
            noise=noise,
        )
    return draw.ids_TC, with_scores(draw, pair)


def with_scores(draw: Draw, pair: Pair) -> Candidates:
    """The candidates as the learner reads them."""
    return Candidates(
        log_p_TC=pair.log_p_TV.gather(1, draw.ids_TC).requires_grad_(),
        log_q_TC=pair.log_q_TV.gather(1, draw.ids_TC),
        log_w_TC=draw.log_w_TC,
    )


def square_errors(objective: Objective, pair: Pair, dense_TV: Tensor, ids_TC: Tensor, drawn: Candidates) -> Tensor:
    """Squared error [T] of the logit gradient ``sum_i k_i (e_i - p)``, ``k = d loss / d log p``."""
    ((origin, design),) = objective.draws.items()
    zero_T = torch.zeros(len(ids_TC), dtype=torch.float64)
    tokens = Tokens(
        log_p_T=zero_T,
        log_q_T=zero_T,
        log_b_T=zero_T,
        sequence_T=pair.sequence_T,
        staleness_T=torch.zeros_like(pair.sequence_T),
        student=drawn if origin == "student" else None,
        teacher=drawn if origin == "teacher" else None,
    )
    context = objective.step_context(tokens) if objective.needs_step_pass else None
    loss_T, _ = objective.token_losses(tokens, context)
    (k_TC,) = torch.autograd.grad(loss_T.sum(), drawn.log_p_TC)
    p_TV = pair.log_p_TV.exp()
    total_T = k_TC.sum(-1)
    if design.distinct:
        own_T = k_TC.square().sum(-1)
    else:
        own_T = torch.einsum("tc,td,tcd->t", k_TC, k_TC, (ids_TC[:, :, None] == ids_TC[:, None, :]).double())
    sparse_TV = dense_TV + total_T[:, None] * p_TV
    return own_T - 2 * (k_TC * sparse_TV.gather(1, ids_TC)).sum(-1) + sparse_TV.square().sum(-1)


def exact_multi_sample(direction: str, pair: Pair, dense_TV: Tensor, log_g_TV: Tensor, budget: int) -> Tensor:
    """Squared error [T] of ``budget`` independent draws, without drawing: the variance of one over their number."""
    p_TV = pair.log_p_TV.exp()
    k_TV = -pair.log_q_TV.exp() if direction == "forward" else p_TV * (pair.log_p_TV - pair.log_q_TV)
    away_TV = 1 - 2 * p_TV + p_TV.square().sum(-1, keepdim=True)
    second_T = (k_TV.square() * away_TV * (-log_g_TV).exp()).sum(-1)
    return (second_T - dense_TV.square().sum(-1)) / budget


def measure(pair: Pair, repeats: int, seed: int) -> Iterator[Row]:
    """Every estimator at every budget, fresh and stale."""
    generator = torch.Generator().manual_seed(seed)
    positions = len(pair.sequence_T)

    def noise(count: int) -> Tensor:
        return torch.rand(positions, count, generator=generator, dtype=torch.float64).clamp(min=1e-300)

    dense = {direction: pair.dense(direction) for direction in ("reverse", "forward")}
    for direction, form_of_design, centring, form in ESTIMATORS:
        for budget in BUDGETS:
            objective = objective_of(direction, form_of_design.format(budget), centring, form)
            ((_, part),) = parts(objective.config)
            found: Row | None = None
            for stale in (False, True):
                if stale and found is not None and part.origin == "teacher":
                    yield replace(found, stale=True)  # a teacher-drawn set does not know the student's version
                    continue
                log_g_TV = pair.log_q_TV if part.origin == "teacher" else pair.log_b_TV if stale else pair.log_p_TV
                if "multi_sample" in form_of_design:
                    error_T = exact_multi_sample(direction, pair, dense[direction], log_g_TV, budget)
                else:
                    constant = not part.design.unbiased
                    draws = 1 if constant else max(1, repeats // 4) if "gumbel" in form_of_design else repeats
                    error_T = torch.zeros(positions, dtype=torch.float64)
                    proposal_TV = log_g_TV.float()
                    for _ in range(draws):
                        ids_TC, drawn = candidates_of(objective, pair, proposal_TV, noise)
                        error_T += square_errors(objective, pair, dense[direction], ids_TC, drawn) / draws
                rel_mse, interval = bootstrap(error_T, dense[direction].square().sum(-1), seed)
                found = Row(
                    direction=direction,
                    design=form_of_design.partition("(")[0],
                    centring=part.centring,
                    origin=part.origin,
                    form=part.form,
                    unbiased=part.design.unbiased and part.centring != "hajek",
                    budget=budget,
                    pair=pair.name,
                    stale=stale,
                    rel_mse=rel_mse,
                    rel_mse_ci=interval,
                    bytes_per_token=BYTES_A_CANDIDATE * budget,
                )
                yield found


def bootstrap(error_T: Tensor, norm_T: Tensor, seed: int) -> tuple[float, tuple[float, float]]:
    """Ratio of sums over positions, and its 95% interval over resampled positions."""
    generator = torch.Generator().manual_seed(seed)
    pick_NT = torch.randint(len(error_T), (1000, len(error_T)), generator=generator)
    ratio_N = error_T[pick_NT].sum(-1) / norm_T[pick_NT].sum(-1)
    low, high = torch.quantile(ratio_N, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(error_T.sum() / norm_T.sum()), (low, high)


def run(model: Path, pairs: list[str], writer: str, repeats: int, seed: int) -> list[Row]:
    """Load the teacher, make the pairs, measure."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for text in PROMPTS
    ]
    rows = []
    for name in pairs:
        started = time.monotonic()
        pair = load_pair(teacher, prompts, name, writer, seed)
        sys.stderr.write(f"{name}: {len(pair.sequence_T)} positions in {time.monotonic() - started:.0f} s\n")
        rows += list(measure(pair, repeats, seed))
        sys.stderr.write(f"{name}: measured after {time.monotonic() - started:.0f} s\n")
    return rows


def table(rows: list[Row]) -> str:
    """Markdown: one line an estimator, one column a budget."""
    lines = []
    for pair in dict.fromkeys(row.pair for row in rows):
        for stale in (False, True):
            title = f"{pair}, {'stale' if stale else 'fresh'}"
            lines += [f"| {title} | " + " | ".join(map(str, BUDGETS)) + " |", "| --- " * (len(BUDGETS) + 1) + "|"]
            for key in dict.fromkeys((r.direction, r.design, r.centring, r.form, r.unbiased) for r in rows):
                values = [
                    f"{r.rel_mse:.3g}"
                    for budget in BUDGETS
                    for r in rows
                    if (r.direction, r.design, r.centring, r.form, r.unbiased) == key
                    and (r.pair, r.stale, r.budget) == (pair, stale, budget)
                ]
                direction, design, centring, form, unbiased = key
                name = f"{direction}, `{design}`" + (f", {centring}" if centring != "none" else "")
                name += f", {form}" if design == "top_k" else ""
                lines.append(f"| {name}{'' if unbiased else ' (biased)'} | " + " | ".join(values) + " |")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Gradient error of sparse estimators on a real pair of models.")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"), help="teacher checkpoint")
    parser.add_argument("--repeats", type=int, default=4, help="draws a position (a quarter of it for gumbel)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--writer", choices=["student", "teacher"], default="teacher", help="who samples the text")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of tables")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    parser.add_argument("--rows", type=Path, help="draw or show rows that --json wrote before, instead of measuring")
    arguments = parser.parse_args()
    if arguments.rows is not None:
        rows = [Row(**row) for row in json.loads(arguments.rows.read_text())["rows"]]
    else:
        rows = run(arguments.model, arguments.pairs, arguments.writer, arguments.repeats, arguments.seed)
    if arguments.figure is not None:
        from tests.benchmarks.estimators_figure import draw_figure

        draw_figure([asdict(row) for row in rows], arguments.figure)
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    elif arguments.figure is None:
        print(table(rows))


if __name__ == "__main__":
    main()
