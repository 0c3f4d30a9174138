"""The handshake's JSON: what a client states about the teacher that it needs."""

import json
from typing import Any

from teacher_cache.errors import HandshakeError
from teacher_cache.identity import Expectation, TokenizerIdentity


def expectation_body(expected: Expectation) -> bytes:
    """The body of a handshake."""
    tokenizer = expected.tokenizer
    values: dict[str, Any] = {
        "tokenizer": None
        if tokenizer is None
        else {
            "digest": tokenizer.digest,
            "vocabulary": tokenizer.vocabulary,
            "special_ids": list(tokenizer.special_ids),
        },
        "temperature": expected.temperature,
        "fingerprint": expected.fingerprint,
        "draw": expected.draw,
        "designs": list(expected.designs),
    }
    return json.dumps(values).encode()


def expectation_from(body: bytes) -> Expectation:
    """What ``expectation_body`` wrote; HandshakeError for anything else."""
    try:
        values = json.loads(body)
        tokenizer, temperature = values["tokenizer"], values["temperature"]
        return Expectation(
            tokenizer=None
            if tokenizer is None
            else TokenizerIdentity(
                digest=str(tokenizer["digest"]),
                vocabulary=int(tokenizer["vocabulary"]),
                special_ids=tuple(int(index) for index in tokenizer["special_ids"]),
            ),
            temperature=None if temperature is None else float(temperature),
            fingerprint=None if values["fingerprint"] is None else str(values["fingerprint"]),
            draw=None if values["draw"] is None else str(values["draw"]),
            designs=tuple(str(spec) for spec in values["designs"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise HandshakeError(f"the handshake cannot be read ({error!r}); use one version on both sides") from error
