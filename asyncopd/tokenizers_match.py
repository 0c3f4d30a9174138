"""Student and teacher must mean the same text by the same token id, or no score means anything."""

import logging
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from asyncopd.errors import DataError
from teacher_cache.identity import vocabulary_of

LOG = logging.getLogger(__name__)

_NAMED_IN_ERROR = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedVocabulary:
    """What both tokenizers agree on.

    size        real vocabulary: one more than the largest id that stands for a token. Heads may have more rows, padded
                to a round number and to different ones; those rows are masked before anything is normalised
    eos_ids     ids that end an answer, from the student's tokenizer and generation config
    """

    size: int
    eos_ids: tuple[int, ...]


def check_tokenizers(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    generation: GenerationConfig | None = None,
) -> SharedVocabulary:
    """Compare two tokenizers token by token.

    generation  the student's, for its EOS ids

    Raises DataError naming the first tokens that differ. A differing EOS or chat template is a warning: the student's
    are used, and the teacher scores the student's token ids as they are.
    """
    of_student = {index: token for token, index in student.get_vocab().items()}
    of_teacher = {index: token for token, index in teacher.get_vocab().items()}
    if of_student != of_teacher:
        raise DataError(_differences(of_student, of_teacher))
    if student.eos_token_id != teacher.eos_token_id:
        LOG.warning(
            "the student ends an answer with %r (id %s), the teacher with %r (id %s); the student's is used",
            student.eos_token,
            student.eos_token_id,
            teacher.eos_token,
            teacher.eos_token_id,
        )
    if student.chat_template != teacher.chat_template:
        LOG.warning(
            "student and teacher have different chat templates%s; the student's is used for both",
            "" if student.chat_template and teacher.chat_template else " (one has none)",
        )
    return SharedVocabulary(size=vocabulary_of(student), eos_ids=eos_ids(student, generation))


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None = None) -> tuple[int, ...]:
    """Ids that end an answer, from tokenizer and generation config; warns where there are none."""
    stated = None if generation is None else generation.eos_token_id
    found = set(stated) if isinstance(stated, list | tuple) else {stated}
    found.add(tokenizer.eos_token_id)
    ids = tuple(sorted(index for index in found if index is not None))
    if not ids:
        LOG.warning("neither the tokenizer nor the generation config states an EOS: answers end only at their limit")
    return ids


def require_head(rows: int, vocabulary: SharedVocabulary, whose: str) -> None:
    """DataError unless a model's head, with ``rows`` rows, has one for every token of the shared vocabulary."""
    if rows < vocabulary.size:
        raise DataError(
            f"the {whose}'s head has {rows} rows and its tokenizer has ids up to {vocabulary.size - 1}: tokens were "
            "added without resizing the model"
        )


def _differences(student: dict[int, str], teacher: dict[int, str]) -> str:
    ids = sorted(index for index in student.keys() | teacher.keys() if student.get(index) != teacher.get(index))
    named = "; ".join(
        f"id {index} is {_name(student, index)} to the student and {_name(teacher, index)} to the teacher"
        for index in ids[:_NAMED_IN_ERROR]
    )
    return (
        f"student and teacher have different tokenizers: {len(ids)} ids differ ({len(student)} against {len(teacher)} "
        f"tokens): {named}. Choose a student and a teacher of one family"
    )


def _name(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "nothing"
