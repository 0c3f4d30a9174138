"""Prompts reach the run as the data set says, and what cannot be used is named before any model loads."""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from asyncopd.errors import ConfigError, DataError
from asyncopd.prompts import DataConfig, load_prompts, read_prompts, save_prompts

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def chat(*contents: str) -> Row:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write_jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_chat_is_put_through_the_template_up_to_the_students_turn(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat("Hi"), chat("Ça va?", "Oui")])
    found = load_prompts(DataConfig(prompts=str(path)), tiny_tokenizer, 100)
    assert [tiny_tokenizer.decode(prompt.token_ids) for prompt in found.prompts] == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nÇa va?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [(prompt.index, prompt.text, prompt.teacher) for prompt in found.prompts] == [
        (0, "Hi", "default"),
        (1, "Ça va?", "default"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_local_files_of_each_kind_read_alike(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, suffix: str
) -> None:
    rows = [{"question": "One?"}, {"question": "Two?"}]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        write_jsonl(path, rows)
    found = load_prompts(DataConfig(prompts=str(path), column="question"), tiny_tokenizer, 100)
    assert [prompt.text for prompt in found.prompts] == ["One?", "Two?"]
    part = load_prompts(DataConfig(prompts=str(path), column="question", split="train[1:]"), tiny_tokenizer, 100)
    assert [prompt.text for prompt in part.prompts] == ["Two?"]
    with pytest.raises(DataError, match="split 'test'"):
        load_prompts(DataConfig(prompts=str(path), column="question", split="test"), tiny_tokenizer, 100)
    assert tiny_tokenizer.decode(found.prompts[0].token_ids).startswith("<|im_start|>user\nOne?")


def test_reading_local_files_writes_nothing_beside_them(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat("Hi")])
    load_prompts(DataConfig(prompts=str(path)), tiny_tokenizer, 100)
    assert [entry.name for entry in tmp_path.iterdir()] == ["chats.jsonl"]


def test_plain_text_can_be_continued_without_a_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = DataConfig(column="text", text_as_message=False)
    found = load_prompts(config, tiny_tokenizer, 100, dataset=[{"text": "Once upon"}])
    assert found.prompts[0].token_ids == tuple(tiny_tokenizer("Once upon")["input_ids"])


def test_system_prompt_and_template_arguments_reach_the_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{{ messages | map(attribute='role') | join(',') }}|{{ thinking }}"
    config = DataConfig(system_prompt="Be brief.", chat_template_args='{"thinking": false}')
    found = load_prompts(config, tokenizer, 100, dataset=[chat("Hi")])
    assert tokenizer.decode(found.prompts[0].token_ids) == "system,user|False"


def test_prompts_that_do_not_fit_are_skipped_counted_and_named(
    tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Dataset.from_list([chat("Hi"), chat("x" * 200), chat(""), chat("Ho")])
    with caplog.at_level(logging.WARNING):
        found = load_prompts(DataConfig(), tiny_tokenizer, 60, dataset=rows)
    assert [(prompt.index, prompt.text) for prompt in found.prompts] == [(0, "Hi"), (1, "Ho")]
    assert [(each.row, each.reason) for each in found.skipped] == [(1, "too long"), (2, "empty")]
    assert "skipped 2 prompts (the limit is 60 tokens): row 1" in caplog.text
    assert "'xxxx" in caplog.text


def test_max_prompt_tokens_is_a_limit_below_the_context(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat("Hi"), chat("Hello there, how are you?")]
    found = load_prompts(DataConfig(max_prompt_tokens=35), tiny_tokenizer, 1000, dataset=rows)
    assert [prompt.text for prompt in found.prompts] == ["Hi"]


def test_held_out_rows_come_from_the_end_and_are_not_trained_on(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat(f"Question {number}") for number in range(5)]
    found = load_prompts(DataConfig(held_out_from_end=2), tiny_tokenizer, 100, dataset=rows)
    assert [prompt.text for prompt in found.prompts] == ["Question 0", "Question 1", "Question 2"]
    assert [(prompt.index, prompt.text) for prompt in found.held_out] == [(0, "Question 3"), (1, "Question 4")]


def test_a_held_out_prompt_that_is_trained_on_is_reported(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [chat("Hi"), chat("New")])
    with caplog.at_level(logging.WARNING):
        load_prompts(DataConfig(held_out=str(held_out)), tiny_tokenizer, 100, dataset=[chat("Hi")])
    assert "1 of 2 held-out prompts are also trained on, the first is 'Hi'" in caplog.text


def test_each_prompt_may_name_its_teacher(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat("1+1?") | {"expert": "maths"}, chat("Bonjour") | {"expert": "french"}]
    found = load_prompts(DataConfig(teacher_column="expert"), tiny_tokenizer, 100, dataset=rows)
    assert [prompt.teacher for prompt in found.prompts] == ["maths", "french"]
    with pytest.raises(DataError, match="'expert' is None; expected a teacher's name"):
        load_prompts(
            DataConfig(teacher_column="expert"), tiny_tokenizer, 100, dataset=[*rows, chat("x") | {"expert": None}]
        )


def test_each_prompt_may_bound_its_answer(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = Dataset.from_list([{"q": "One?", "longest": 3}, {"q": "Two?", "longest": 200}])
    config = DataConfig(column="q", max_new_tokens_column="longest")
    found = load_prompts(config, tiny_tokenizer, 100, rows).prompts
    assert [prompt.max_new_tokens for prompt in found] == [3, 200]
    save_prompts(tmp_path / "prompts.jsonl", found)
    assert read_prompts(tmp_path / "prompts.jsonl") == found


@pytest.mark.parametrize("longest", [0, -1, None, 2.5, "9", True])
def test_a_bound_that_is_no_number_of_tokens_is_named(tiny_tokenizer: PreTrainedTokenizerFast, longest: object) -> None:
    config = DataConfig(column="q", max_new_tokens_column="longest")
    with pytest.raises(DataError, match=rf"row 0 of .*'longest' is {longest!r}; expected the tokens"):
        load_prompts(config, tiny_tokenizer, 100, [{"q": "One?", "longest": longest}])


def test_a_missing_column_says_which_columns_there_are(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"message": "Hi", "id": 1}]
    expected = r"no column 'messages' \(did you mean 'message'\?\); it has 'message', 'id': set data\.column"
    with pytest.raises(DataError, match=expected):
        load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=rows)


@pytest.mark.parametrize("rows", [[], Dataset.from_dict({"messages": []})])
def test_an_empty_data_set_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, rows: Any) -> None:
    with pytest.raises(DataError, match="the data set in memory is empty"):
        load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=rows)


def test_an_empty_file_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(tmp_path / "none.jsonl", [])
    with pytest.raises(DataError, match=r"none\.jsonl' is empty"):
        load_prompts(DataConfig(prompts=str(path)), tiny_tokenizer, 100)


def test_a_data_set_of_which_nothing_fits_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"no prompt of .* can be used \(2 too long\); the limit is 5 tokens"):
        load_prompts(DataConfig(), tiny_tokenizer, 5, dataset=[chat("Hi"), chat("Ho")])


def test_a_missing_file_names_those_near_it(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [chat("Hi")])
    with pytest.raises(DataError, match=r"there is no prompts file .*promts\.jsonl'; near it are prompts\.jsonl"):
        load_prompts(DataConfig(prompts=str(tmp_path / "promts.jsonl")), tiny_tokenizer, 100)


def test_a_file_that_is_not_json_is_named(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"messages": [\n')
    with pytest.raises(DataError, match=r"broken\.jsonl' cannot be parsed"):
        load_prompts(DataConfig(prompts=str(path)), tiny_tokenizer, 100)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("text\nHi\n")
    with pytest.raises(DataError, match=r"ends in '\.csv'; expected one of \.jsonl, \.json, \.parquet"):
        load_prompts(DataConfig(prompts=str(path)), tiny_tokenizer, 100)


def test_a_hub_data_set_is_not_asked_for_when_offline() -> None:
    code = (
        "from asyncopd.prompt_source import read_rows\nfrom asyncopd.errors import DataError\n"
        "try:\n    read_rows('nobody/nothing', subset=None, split='train')\n"
        "except DataError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "'nobody/nothing' are neither a local file" in done.stdout


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"messages": 3}], "holds int; expected text, or a list of messages"),
        ([{"messages": [{"from": "human", "value": "Hi"}]}], "is no message; expected a mapping with"),
        ([{"messages": [{"role": "user", "content": None}]}], "is no message; expected a mapping with"),
    ],
)
def test_a_row_that_is_no_chat_is_named(tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Row], message: str) -> None:
    with pytest.raises(DataError, match=f"row 0 of the data set in memory.*{message}"):
        load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=rows)


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_remedy(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"data\.text_as_message false"):
        load_prompts(DataConfig(), tokenizer, 100, dataset=[chat("Hi")])


def test_a_chat_that_the_template_refuses_is_named(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match="row 0 .*the chat template refuses it: no system role"):
        load_prompts(DataConfig(system_prompt="Be brief."), tokenizer, 100, dataset=[chat("Hi")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out": "x.jsonl", "held_out_from_end": 3}, "set one of them"),
        ({"held_out_from_end": -1}, "expected a number of rows"),
        ({"max_prompt_tokens": 0}, "expected at least 1"),
        ({"chat_template_args": "thinking=false"}, "expected a JSON object"),
        ({"chat_template_args": "[1]"}, "expected a JSON object"),
    ],
)
def test_a_config_that_cannot_work_says_so_at_once(fields: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_no_source_at_all_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts is None"):
        load_prompts(DataConfig(), tiny_tokenizer, 100)


def test_splits_and_streams_in_memory_are_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = Dataset.from_list([chat("Hi")])
    with pytest.raises(DataError, match=r"holds the splits train; give one of them"):
        load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=datasets.DatasetDict(train=rows))
    with pytest.raises(DataError, match="is a stream"):
        load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=rows.to_iterable_dataset())


def test_saved_prompts_read_back_as_they_were(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [chat("Two\nlines – and a dash"), chat("Hi")]
    found = load_prompts(DataConfig(), tiny_tokenizer, 100, dataset=rows)
    path = tmp_path / "prompts.jsonl"
    save_prompts(path, found.prompts)
    assert read_prompts(path) == found.prompts
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_prompts_of_another_form_are_not_taken_for_saved_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no tokenised prompts"):
        read_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError, match="holds no tokenised prompts"):
        read_prompts(write_jsonl(tmp_path / "prompts.jsonl", [chat("Hi")]))


def test_the_recipes_prompts_load(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    folder = Path(__file__).parent.parent / "recipes" / "data"
    config = DataConfig(prompts=str(folder / "prompts.jsonl"), held_out=str(folder / "held_out.jsonl"))
    found = load_prompts(config, tiny_tokenizer, 1000)
    assert len(found.prompts) >= 220
    assert len(found.held_out) == 40
    assert not found.skipped
