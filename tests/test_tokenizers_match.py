"""Tokenizers are compared token by token; what merely differs in use is a warning that says which is used."""

import copy
import logging

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from asyncopd.errors import DataError
from asyncopd.tokenizers_match import SharedVocabulary, check_tokenizers, eos_ids, require_head


def test_equal_tokenizers_share_their_real_vocabulary(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shared = check_tokenizers(tiny_tokenizer, copy.deepcopy(tiny_tokenizer))
    assert shared == SharedVocabulary(size=len(tiny_tokenizer), eos_ids=(tiny_tokenizer.eos_token_id,))


def test_added_tokens_belong_to_the_vocabulary(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["<tool>"])
    assert check_tokenizers(longer, longer).size == len(tiny_tokenizer) + 1


def test_one_token_more_is_a_mismatch_that_is_named(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["<tool>"])
    expected = f"1 ids differ .*id {len(tiny_tokenizer)} is nothing to the student and '<tool>' to the teacher"
    with pytest.raises(DataError, match=expected):
        check_tokenizers(tiny_tokenizer, longer)


def test_two_tokens_exchanged_are_a_mismatch_though_the_sizes_agree(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = copy.deepcopy(tiny_tokenizer), copy.deepcopy(tiny_tokenizer)
    first.add_tokens(["<a>", "<b>"])
    second.add_tokens(["<b>", "<a>"])
    with pytest.raises(DataError, match="is '<a>' to the student and '<b>' to the teacher"):
        check_tokenizers(first, second)


def test_a_differing_eos_or_template_is_a_warning_that_says_which_is_used(
    tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = copy.deepcopy(tiny_tokenizer)
    teacher.eos_token = "<|endoftext|>"
    teacher.chat_template = None
    with caplog.at_level(logging.WARNING):
        shared = check_tokenizers(tiny_tokenizer, teacher)
    assert shared.eos_ids == (tiny_tokenizer.eos_token_id,)
    assert "ends an answer with '<|im_end|>'" in caplog.text
    assert "the student's is used" in caplog.text
    assert "different chat templates (one has none); the student's is used for both" in caplog.text


def test_eos_ids_are_those_of_tokenizer_and_generation_config(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    own = tiny_tokenizer.eos_token_id
    assert eos_ids(tiny_tokenizer, GenerationConfig(eos_token_id=[own, 7])) == (7, own)
    assert eos_ids(tiny_tokenizer, GenerationConfig(eos_token_id=3)) == (3, own)
    assert eos_ids(tiny_tokenizer, GenerationConfig()) == (own,)


def test_a_tokenizer_without_eos_is_a_warning(
    tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    endless = copy.deepcopy(tiny_tokenizer)
    endless.eos_token = None
    with caplog.at_level(logging.WARNING):
        assert eos_ids(endless) == ()
    assert "answers end only at their limit" in caplog.text


def test_a_head_may_be_wider_than_the_vocabulary_but_not_narrower(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shared = check_tokenizers(tiny_tokenizer, tiny_tokenizer)
    require_head(shared.size + 5, shared, "student")
    with pytest.raises(DataError, match="the student's head has 3 rows"):
        require_head(3, shared, "student")
