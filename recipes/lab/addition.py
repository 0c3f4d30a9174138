"""The lab's task: addition with a written scratchpad, one column a word, the result at the end.

    471+285=  ->  15006 78015 42107 0756.

A column's word is the two digits, the carry that comes in, and their sum in two digits; columns come from the right.
``.`` ends the answer. One wrong digit early on and everything after it is written in a state that the teacher never
went through, which is what makes stale states matter.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import RolloutRequest

SYMBOLS = "0123456789+= ."
EOS = "."
DIGITS = 3
DATA = Path(__file__).parent / "data"
GREEDY = 1e-4
"""Temperature that stands for greedy answers."""


def prompt(a: int, b: int, digits: int = DIGITS) -> str:
    """What the student is asked."""
    return f"{a:0{digits}d}+{b:0{digits}d}="


def answer(a: int, b: int, digits: int = DIGITS) -> str:
    """The whole right answer, its end included."""
    words, carry = [], 0
    for column in range(digits):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        words.append(f"{x}{y}{carry}{total:02d}")
        carry = total // 10
    return " ".join([*words, f"{a + b:0{digits + 1}d}"]) + EOS


def solution(question: str) -> str:
    """The right answer to a prompt."""
    a, b = question.rstrip("=").split("+")
    return answer(int(a), int(b), len(a))


def answer_tokens(digits: int = DIGITS) -> int:
    """Tokens of a right answer."""
    return len(answer(0, 0, digits))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a symbol; ``.`` ends an answer and fills padded places."""
    core = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(SYMBOLS)}, unk_token=EOS))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=EOS)


def draw_prompts(count: int, seed: int, digits: int = DIGITS) -> list[str]:
    """Prompts of uniform pairs, without repetition."""
    rng = random.Random(seed)
    largest = 10**digits - 1
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(prompt(rng.randint(0, largest), rng.randint(0, largest), digits))
    return list(found)


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))


def read_prompts(path: Path) -> list[str]:
    """What ``write_prompts`` wrote."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def greedy_accuracy(model: nn.Module, prompts: Sequence[str]) -> Mapping[str, float]:
    """Share of prompts whose greedy answer is right in every symbol."""
    tokenizer = make_tokenizer()
    longest = max(len(solution(each)) for each in prompts)
    engine = TransformersEngine(
        model,
        vocabulary=len(tokenizer),
        eos_token_ids=[tokenizer.eos_token_id],
        sampling=SamplingConfig(temperature=GREEDY, max_new_tokens=longest),
        run_seed=0,
        version=0,
    )
    training = model.training
    engine.submit(
        [
            RolloutRequest(uid=str(place), prompt_ids=tuple(tokenizer(each)["input_ids"]), min_version=0)
            for place, each in enumerate(prompts)
        ]
    )
    right = 0
    while engine.in_flight:
        for rollout in engine.step():
            right += tokenizer.decode(rollout.response_ids_T.tolist()) == solution(prompts[int(rollout.uid)])
    model.train(training)
    return {"held_out/accuracy": right / len(prompts)}
