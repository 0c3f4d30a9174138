"""The teacher's whole distribution at every position of an answer, through any Scorer, a piece at a time.

Shape suffixes: t positions of a piece, V real vocabulary.

A record over the whole vocabulary is large (200 KB a token at 49,152 tokens), so an answer is asked for in pieces: what
comes before a piece is its context. A piece has the distributions that the whole answer would have there.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from teacher_cache.errors import ScoringError
from teacher_cache.scorer import Scorer, ScoreRequest

FULL = "full"
_BYTES = 4


def dense_logprobs(
    scorer: Scorer, request: ScoreRequest, *, vocabulary: int, piece_bytes: int = 2**26
) -> Iterator[tuple[int, Tensor]]:
    """First position and float32 logprobs [t, V] (nats, at the scorer's temperature) of each piece, in order.

    piece_bytes   of one answer of the scorer; below the ``max_record_bytes`` of a service, which counts 12 bytes for a
                  score of 4. At least one position is asked for

    ScoringError where the teacher cannot score the answer. Candidates of the request are not asked for.
    """
    step = max(1, piece_bytes // (vocabulary * _BYTES))
    answer = request.response_ids_T
    for first in range(0, len(answer), step):
        piece = replace(
            request,
            prompt_ids=(*request.prompt_ids, *answer[:first].tolist()),
            response_ids_T=answer[first : first + step],
            candidates=None,
            draw=FULL,
        )
        (record,) = scorer.score([piece])
        if isinstance(record, ScoringError):
            raise record
        log_q_tV = record.of_origin("teacher").log_q_TC
        if log_q_tV is None or log_q_tV.shape != (len(piece.response_ids_T), vocabulary):
            raise ScoringError(
                f"{request.uid}: scores of shape {None if log_q_tV is None else tuple(log_q_tV.shape)}; expected "
                f"{(len(piece.response_ids_T), vocabulary)}: give the teacher's real vocabulary"
            )
        yield first, log_q_tV
