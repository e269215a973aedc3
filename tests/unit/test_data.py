import copy
import json
import sys
from itertools import chain, islice

import datasets
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from colocate.data.loading import load_prompts
from colocate.data.prompts import check_context_length, decode_completions, tokenize_prompts, validate_columns
from colocate.data.sampler import PromptBatches, rank_slice

WORDS = ["<pad>", "<eos>", "<bos>", "<user>", "<assistant>", "<think>", "two", "plus", "is", "four", "what"]
ROWS = [{"prompt": "what is", "answer": "two"}, {"prompt": "two plus two", "answer": "four"}]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if thinking %} <think>{% endif %}{% endif %}"
    )
    return tokenizer


def ids(text):
    return tuple(WORDS.index(word) for word in text.split())


def ask(content):
    return [{"role": "user", "content": content}]


# --- prompts -----------------------------------------------------------------------------------------------


def test_standard_prompts_are_tokenized_with_special_tokens(tokenizer):
    assert tokenize_prompts(ROWS, tokenizer) == [ids("<bos> what is"), ids("<bos> two plus two")]


def test_conversations_go_through_the_chat_template(tokenizer):
    rows = [
        {"prompt": [*ask("two plus two"), {"role": "assistant", "content": "four"}, *ask("what is two")]},
        {"prompt": ask("what"), "chat_template_kwargs": {"thinking": True, "unused": None}},
    ]
    first = "<user> two plus two <assistant> four <user> what is two <assistant>"
    assert tokenize_prompts(rows, tokenizer) == [ids(first), ids("<user> what <assistant> <think>")]
    (thinking,) = tokenize_prompts(rows[:1], tokenizer, chat_template_kwargs={"thinking": True})
    assert thinking == ids(first + " <think>")


def test_a_rows_template_kwargs_win_over_the_runs(tokenizer):
    row = {"prompt": ask("what"), "chat_template_kwargs": {"thinking": False}}
    (got,) = tokenize_prompts([row], tokenizer, chat_template_kwargs={"thinking": True})
    assert got == ids("<user> what <assistant>")


def test_max_prompt_length_keeps_the_last_tokens(tokenizer):
    rows = [{"prompt": "two plus two"}, {"prompt": "what"}, {"prompt": ask("what is two")}]
    expected = [ids("plus two"), ids("<bos> what"), ids("two <assistant>")]
    assert tokenize_prompts(rows, tokenizer, max_prompt_length=2) == expected
    with pytest.raises(ValueError, match="max_prompt_length=0"):
        tokenize_prompts(rows, tokenizer, max_prompt_length=0)


def test_prompts_that_cannot_be_tokenized_are_refused(tokenizer):
    for prompt in (3, None, [], ["text"], {"role": "user"}, [*ask("what"), "text"]):
        with pytest.raises(ValueError, match="A prompt is a string or a non-empty list of messages"):
            tokenize_prompts([{"prompt": prompt}], tokenizer)
    with pytest.raises(ValueError, match="other than text"):
        tokenize_prompts([{"prompt": ask([{"type": "image", "image": "x.png"}])}], tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*-Instruct.*system_prompt"):
        tokenize_prompts([{"prompt": ask("what")}], bare)
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match=r"Row 1 .*has no tokens"):
        tokenize_prompts([{"prompt": "what"}, {"prompt": ""}], bare)


def test_text_that_is_no_tokens_is_refused_with_its_row():
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")))
    with pytest.raises(ValueError, match=r"Row 1 .*: The prompt 'b' has characters that are no tokens .*UNK"):
        tokenize_prompts([{"prompt": "a"}, {"prompt": "b"}], words)


SILENT = [{"role": "user"}, {"role": "user", "content": None}, {"role": "assistant", "tool_calls": []}]


@pytest.mark.parametrize("message", SILENT)
def test_a_message_without_content_is_refused_and_not_read_as_none(tokenizer, message):
    rows = [{"prompt": ask("what")}] * 5 + [{"prompt": [*ask("two"), message, *ask("four")]}]
    with pytest.raises(ValueError, match=r"Row 5 .*: A message has no content: .*'role'"):
        tokenize_prompts(rows, tokenizer)
    with pytest.raises(ValueError, match=r"Row 5 .*: A message has no content"):
        validate_columns(datasets.Dataset.from_list(rows))
    with pytest.raises(ValueError, match=r"Row 0 .*: A message has no content"):
        validate_columns(datasets.Dataset.from_list(rows[5:]).to_iterable_dataset())


def test_a_message_that_calls_a_tool_needs_no_content(tokenizer):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    rows = [{"prompt": [*ask("two plus two"), call, {"role": "tool", "content": "four"}]}]
    assert tokenize_prompts(rows, tokenizer)
    validate_columns(datasets.Dataset.from_list(rows))
    assert tokenize_prompts([{"prompt": ask("")}], tokenizer)  # empty is not missing


def test_what_a_chat_template_raises_names_the_row(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('Unknown role: ' + messages[0].role) }}"
    with pytest.raises(ValueError, match=r"prompt 37: The chat template .*Unknown role: user[\s\S]*'what'"):
        tokenize_prompts([{"prompt": ask("what")}], strict, names=["prompt 37"])
    with pytest.raises(ValueError, match=r"Row 0 .*: A message has no content"):
        tokenize_prompts([{"prompt": ask([{"type": "text", "text": None}])}], tokenizer)
    with pytest.raises(ValueError, match=r"Row 0 .*: A message has no role"):
        tokenize_prompts([{"prompt": [*ask("what"), {"content": "two"}]}], tokenizer)


def test_completions_take_the_form_of_their_prompts(tokenizer):
    completions = [ids("four <eos>"), ids("<bos> two")]
    expected = ["four", [{"role": "assistant", "content": "two"}]]
    assert decode_completions(completions, ["what", ask("what")], tokenizer) == expected
    assert decode_completions([], [], tokenizer) == []


def test_context_length_error_shows_the_arithmetic():
    check_context_length(100, 28, 128)
    with pytest.raises(ValueError, match=r"101 tokens \+ max_completion_length=28 = 129 .* 128.*at most 100"):
        check_context_length(101, 28, 128)
    with pytest.raises(ValueError, match=r"Lower max_completion_length\.$"):
        check_context_length(1, 128, 128)


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["a"], "answer": ["b"]}, "no column 'prompt'; it has 'question', 'answer'"),
        ({"prompt": []}, "empty"),
        ({"prompt": ["a"], "image": ["b"]}, "'image', but only text"),
        ({"prompt": ["a"], "images": [["b"]]}, "'images', but only text"),
        ({"prompt": ["a"], "completions": ["b"]}, "'completions' has the name of an argument"),
        ({"prompt": [1]}, "A prompt is a string"),
    ],
)
def test_datasets_that_cannot_be_trained_on_are_refused(columns, message, as_stream):
    dataset = datasets.Dataset.from_dict(columns)
    if as_stream:
        rows = dataset.to_list()
        dataset = datasets.IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match=message):
        validate_columns(dataset)


def test_good_datasets_pass():
    questions = datasets.Dataset.from_dict({"question": ["what is", "two plus"]})
    transformed = questions.with_transform(lambda rows: {"prompt": [q + " two" for q in rows["question"]]})
    validate_columns(transformed)
    validate_columns(datasets.Dataset.from_list(ROWS))
    validate_columns(datasets.Dataset.from_list([{"prompt": ask("what"), "completion": "x"}]))


# --- sampler -----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    num_rows=st.integers(4, 20),
    num_prompts=st.integers(1, 4),
    num_taken=st.integers(0, 25),
    stream=st.booleans(),
    shuffle=st.booleans(),
    unused=st.booleans(),
)
def test_resuming_continues_where_the_run_stopped(num_rows, num_prompts, num_taken, stream, shuffle, unused):
    dataset = datasets.Dataset.from_dict({"prompt": [str(i) for i in range(num_rows)]})
    dataset = dataset.to_iterable_dataset() if stream else dataset
    uninterrupted = list(islice(PromptBatches(dataset, num_prompts, shuffle=shuffle), num_taken + 5))
    stopped = PromptBatches(dataset, num_prompts, shuffle=shuffle)
    taken = list(islice(stopped, num_taken))
    state, num_used = stopped.state_dict(), num_taken
    if unused and taken:  # the last batch was drawn, but not trained on
        state, num_used = stopped.state_dict(taken[-1]), num_taken - 1
    resumed = PromptBatches(dataset, num_prompts, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert list(islice(resumed, 5)) == uninterrupted[num_used : num_used + 5]
    stopped.load_state_dict(state)
    assert next(stopped) == uninterrupted[num_used]


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12), num_taken=st.integers(0, 11))
def test_batches_of_other_sizes_go_on_where_the_run_stopped(sizes, num_taken):
    dataset = datasets.Dataset.from_dict({"prompt": [str(i) for i in range(9)]})
    whole, stopped, resumed = (PromptBatches(dataset, 3) for _ in range(3))
    expected = [whole.take(size) for size in sizes]
    assert [key for batch in expected for key in batch.keys] == list(range(sum(sizes)))
    for epoch in range(expected[-1].epoch + 1):
        rows = [row["prompt"] for batch in expected if batch.epoch == epoch for row in batch.rows]
        assert len(rows) == len(set(rows))
        assert epoch == expected[-1].epoch or len(rows) > 9 - 4
    for size in sizes[:num_taken]:
        stopped.take(size)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [resumed.take(size) for size in sizes[num_taken:]] == expected[num_taken:]


def test_resuming_reads_no_prompt_that_was_used():
    class Counting(list):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    reads = []
    batches = PromptBatches(Counting({"prompt": i} for i in range(100)), 4)
    batches.load_state_dict(batches.state_dict() | {"epoch": 7, "row": 12, "number": 178, "key": 712})
    next(batches)
    assert len(reads) == 4


def test_keys_are_never_used_twice():
    dataset = datasets.Dataset.from_dict({"prompt": list("abcdefg")})
    batches = list(islice(PromptBatches(dataset, 3), 8))
    keys = [key for batch in batches for key in batch.keys]
    assert keys == list(range(24))
    assert [(b.epoch, b.row, b.number) for b in batches[:4]] == [(0, 0, 0), (0, 3, 1), (1, 0, 2), (1, 3, 3)]


def test_positions_in_another_order_are_refused():
    dataset = datasets.Dataset.from_dict({"prompt": list("abcdefg")})
    state = PromptBatches(dataset, 3, seed=1).state_dict()
    fewer_rows = PromptBatches(dataset.select(range(5)), 3, seed=1)
    in_order = PromptBatches(dataset, 3, seed=1, shuffle=False)
    for other in (PromptBatches(dataset, 2, seed=1), PromptBatches(dataset, 3, seed=2), fewer_rows, in_order):
        with pytest.raises(ValueError, match="position in the data was taken with"):
            other.load_state_dict(state)


def test_a_stream_without_a_full_batch_is_refused_instead_of_read_for_ever():
    stream = datasets.Dataset.from_dict({"prompt": ["a", "b"]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="2 prompts, but a generation batch needs 3"):
        next(PromptBatches(stream, 3))


@given(num_prompts=st.integers(1, 9), num_generations=st.integers(1, 9), world_size=st.integers(1, 9))
def test_rank_slices_are_equal_and_make_up_the_batch(num_prompts, num_generations, world_size):
    if num_prompts * num_generations % world_size:
        with pytest.raises(ValueError, match="cannot be divided"):
            rank_slice(num_prompts, num_generations, 0, world_size)
        return
    parts = [rank_slice(num_prompts, num_generations, rank, world_size) for rank in range(world_size)]
    flat = [[(p, member) for p, members in part for member in members] for part in parts]
    assert {len(part) for part in flat} == {num_prompts * num_generations // world_size}
    assert [*chain(*flat)] == [(p, member) for p in range(num_prompts) for member in range(num_generations)]
    assert all(len(members) for part in parts for _, members in part)


# --- loading -----------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_json(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.json").write_text(json.dumps(ROWS))
    dataset.to_parquet(tmp_path / "prompts.parquet")
    dataset.to_csv(tmp_path / "prompts.csv")
    dataset.save_to_disk(tmp_path / "saved")
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([1])})
    splits.save_to_disk(tmp_path / "saved_splits")
    (tmp_path / "folder").mkdir()
    dataset.to_json(tmp_path / "folder" / "train.jsonl")
    dataset.select([1]).to_json(tmp_path / "folder" / "test.jsonl")
    return tmp_path


GOOD_ROW = b'{"prompt": "a"}\n'


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.csv", b"", "a.csv is empty"),
        ("a.jsonl", GOOD_ROW + b'{"prompt": \n', "a.jsonl has no JSON in line 2"),
        ("a.jsonl", GOOD_ROW * 2 + b'{"prompt": "\xff"}\n', "a.jsonl is not text in UTF-8, line 3"),
        ("a.jsonl", b'\n"text"\n', "a.jsonl has a str in line 2"),
        ("a.parquet", b"noise", "a.parquet"),
    ],
)
def test_damaged_files_are_named_with_the_line(name, content, message, streaming, tmp_path):
    (tmp_path / name).write_bytes(content)
    options = {"streaming": True} if streaming else {}
    with pytest.raises(ValueError) as error:
        load_prompts(str(tmp_path / name), cache_dir=str(tmp_path / "cache"), **options)
    assert message in str(error.value)


def test_a_damaged_file_of_a_directory_is_named(files):
    (files / "folder" / "train-2.jsonl").write_bytes(GOOD_ROW + b"{")
    with pytest.raises(ValueError, match=r"train-2\.jsonl has no JSON in line 2"):
        load_prompts(str(files / "folder"), cache_dir=str(files / "cache"))


def test_another_encoding_can_be_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\n\u00e9\n", encoding="latin-1")
    options = {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match=r"a\.csv is not text in UTF-8, line 2"):
        load_prompts(str(tmp_path / "a.csv"), **options)
    (row,) = load_prompts(str(tmp_path / "a.csv"), encoding="latin-1", **options)
    assert row == {"prompt": "\u00e9"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": 1}, "unexpected keyword argument 'foo'"),
        ({"split": "dev"}, "split 'dev'"),
        ({"path": "x"}, "have 'path', which its name decides"),
        ({"data_files": "x"}, "have 'data_files'"),
        ({"features": 3}, "with {'features': 3}"),
    ],
)
def test_arguments_that_no_reader_takes(options, message, files):
    with pytest.raises(ValueError) as error:
        load_prompts(str(files / "prompts.jsonl"), **options)
    assert message in str(error.value) and "prompts.jsonl" in str(error.value)


@pytest.mark.parametrize(
    "name", ["prompts.jsonl", "prompts.json", "prompts.parquet", "prompts.csv", "folder"]
)
def test_load_files(files, name):
    assert load_prompts(str(files / name), cache_dir=str(files / "cache")).to_list() == ROWS


def test_load_splits(files):
    for name in ("folder", "saved_splits"):
        options = {"cache_dir": str(files / "cache")} if name == "folder" else {}
        assert load_prompts(str(files / name), split="test", **options).to_list() == ROWS[1:]
    assert load_prompts(str(files / "saved")).to_list() == ROWS
    with pytest.raises(ValueError, match="no split 'dev'; it has 'train', 'test'"):
        load_prompts(str(files / "saved_splits"), split="dev")
    with pytest.raises(ValueError, match="takes no streaming"):
        load_prompts(str(files / "saved"), streaming=True)


def test_load_stream(files):
    stream = load_prompts(str(files / "prompts.jsonl"), streaming=True)
    assert isinstance(stream, datasets.IterableDataset)
    assert list(stream) == ROWS


def test_missing_files_name_the_nearest(files):
    with pytest.raises(FileNotFoundError, match=r"prompt\.jsonl.*Did you mean .*prompts\.jsonl"):
        load_prompts(str(files / "prompt.jsonl"))
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist either"):
        load_prompts(str(files / "nowhere" / "prompts.jsonl"))


def test_unreadable_kinds_are_refused(files):
    (files / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt.*\.jsonl, \.json"):
        load_prompts(str(files / "notes.txt"))
    (files / "folder" / "more.csv").write_text("prompt\nhello\n")
    with pytest.raises(ValueError, match=r"\.csv, \.jsonl files mixed"):
        load_prompts(str(files / "folder"))
    (files / "empty").mkdir()
    with pytest.raises(ValueError, match="holds none"):
        load_prompts(str(files / "empty"))


def test_generated_task_is_the_same_each_time_and_takes_its_parameters():
    options = {"size": 5, "min_terms": 2, "max_terms": 2}
    dataset = load_prompts("reasoning_gym:chain_sum", **options)
    assert dataset.column_names == ["prompt", "entry"]
    task = reasoning_gym.create_dataset("chain_sum", seed=42, **options)
    assert list(dataset["prompt"]) == [problem["question"] for problem in task]
    assert load_prompts("reasoning_gym:chain_sum", **options).to_list() == dataset.to_list()
    assert load_prompts("reasoning_gym:chain_sum", seed=1, **options)["prompt"] != dataset["prompt"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:chain_sums", {}, "no task 'chain_sums'. Did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"terms": 3}, "no parameter 'terms'; it has .*max_terms"),
        ("reasoning_gym:chain_sum", {"min_terms": 3, "max_terms": 2}, "refuses its parameters"),
        ("reasoning_gym:chain_sum", {"split": "test"}, "neither configurations nor splits"),
    ],
)
def test_generated_task_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(name, **options)


def test_generated_tasks_need_one_hash_seed_for_all_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        load_prompts("reasoning_gym:chain_sum", size=1)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load_prompts("reasoning_gym:chain_sum", size=1)) == 1


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # an import raises ImportError
    with pytest.raises(ImportError, match=r'pip install "reasoning-gym>='):
        load_prompts("reasoning_gym:chain_sum")
