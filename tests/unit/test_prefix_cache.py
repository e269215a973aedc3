"""What the native engine finds again in its KV cache, against an engine that never looks for anything."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from eight_bit_models import ONE_ROUNDING
from engine_models import VOCAB_SIZE, make_lora, make_model, make_prompts
from engine_pressure import Pressure, Windowed, awake
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.engines.native import capacity
from colocate.engines.native.model_runner import ModelRunner
from colocate.engines.native.pages import PagePool, pages_for
from colocate.engines.native.prefix_cache import PrefixCache
from colocate.engines.requests import turn_key
from colocate.types import Completion, Prompt, SamplingParams

EXAMPLES = 12
LONGEST = 44
MOST_DRAWN = 6
BEGINNINGS = tuple(prompt.token_ids for prompt in make_prompts([9, 9, 17], seed=3))
STOPS = tuple(range(0, VOCAB_SIZE, 6))


def change_weights(models, version: int) -> None:
    for model in models:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def drained(engine) -> dict[int, Completion]:
    turns = {}
    while engine.is_busy:
        turns |= engine.poll()
    return turns


def assert_pages_are_counted(engine) -> None:
    """Every page has as many holders as hold it, and is free, findable and named as it should be."""
    held: Counter[int] = Counter()
    if engine._rollout is not None:
        scheduler = engine._rollout.scheduler
        for sequence in [*scheduler.running, *scheduler._idle]:
            held.update(sequence.pages)
        for group in scheduler._retained:
            held.update(group.pages)
            held.update([] if group.tail_page is None else [group.tail_page])
    pool: PagePool = engine._cache.pool
    assert pool.num_pages <= engine._cache.num_pages
    assert pool._num_holders == [held[page] for page in range(pool.num_pages)]
    free = {page for page in range(pool.num_pages) if not held[page]}
    assert {*pool._nameless, *pool._findable} == free and pool.num_free == len(free)
    assert pool._findable.keys() == free & pool._names.keys()
    assert pool._by_name == {name: page for page, name in pool._names.items()}


@dataclass(eq=False)
class Asked:
    """A turn under way, and the tokens that it should have."""

    prompt: Prompt
    limit: int
    is_kept: bool
    turn: int
    conversation: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    is_known: bool = True
    """False: older weights have read its context in part, which no engine does alone."""


class Conversations:
    """Conversations whose turns begin alike, on a cache with few pages, while weights come and go.

    `alone` has weights of its own, equal at all times, and completes each context by `generate`, which reads
    every token.
    """

    def __init__(self, spare_pages, page_size, max_num_seqs, steps_per_look, temperature, has_adapters):
        model = make_lora("qwen3") if has_adapters else make_model("qwen3")
        self.models = model, copy.deepcopy(model)
        self.has_adapters, self.are_adapters_on = has_adapters, True
        num_pages = None if spare_pages is None else pages_for(LONGEST - 1, page_size) + spare_pages
        self.engine = awake(
            model,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            max_model_len=LONGEST,
            kv_cache_tokens=None if num_pages is None else num_pages * page_size,
        )
        self.engine._backend = Windowed(steps_per_look)
        self.alone = awake(self.models[1])
        self.sampling = SamplingParams(LONGEST, temperature=temperature, stop_token_ids=STOPS)
        self.version = self.num_asked = 0
        self.contexts = list(BEGINNINGS)
        self.asked: dict[int, Asked] = {}
        self.resting: dict[int, Asked] = {}

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, conversation, cut, given, limits, is_kept):
        """A turn goes on from a conversation, or from somewhere in the middle of it."""
        context = self.contexts[conversation]
        context = context[: max(1, len(context) - cut)]
        if len(context) + len(given) + MOST_DRAWN > LONGEST:
            context = self.contexts[conversation] = BEGINNINGS[conversation]
        self.num_asked += 1
        samples, most = range(len(limits)), tuple(limits)
        prompt = Prompt((*context, *given), self.num_asked, samples, most)
        numbers = self.engine.submit([prompt], self.sampling, keep=is_kept)
        for number, sample, limit in zip(numbers, samples, limits, strict=True):
            own = replace(prompt, samples=range(sample, sample + 1), max_tokens=(limit,))
            self.begin(number, Asked(own, limit, is_kept, 0, conversation))

    def extend(self, which, given, limit):
        if not self.resting:
            return
        number = sorted(self.resting)[which % len(self.resting)]
        before = self.resting.pop(number)
        context = before.prompt.token_ids + before.token_ids
        if len(context) + len(given) + limit > LONGEST:
            return self.engine.abort([number])
        self.engine.extend(number, given, limit)
        prompt = replace(before.prompt, token_ids=(*context, *given), max_tokens=(limit,))
        turn = replace(before, prompt=prompt, limit=limit, turn=before.turn + 1, token_ids=(), logprobs=())
        self.begin(number, turn)

    def begin(self, number: int, asked: Asked) -> None:
        self.asked[number] = asked
        self.go_on_alone(asked)

    def go_on_alone(self, asked: Asked) -> None:
        """Let the rest of a turn be what the weights of now draw after what it has."""
        if len(asked.token_ids) == asked.limit or {*asked.token_ids[-1:]} & {*STOPS}:
            return
        left = asked.limit - len(asked.token_ids)
        key = turn_key(asked.prompt.key, asked.turn)
        context = asked.prompt.token_ids + asked.token_ids
        prompt = replace(asked.prompt, token_ids=context, key=key, max_tokens=(left,))
        (rest,) = self.alone.generate([prompt], self.sampling)
        asked.token_ids += rest.token_ids
        asked.logprobs += rest.logprobs

    def poll(self, num_polls):
        for _ in range(num_polls):
            for number, completion in self.engine.poll().items():
                self.end(number, completion)

    def end(self, number: int, completion: Completion) -> None:
        asked = self.asked.pop(number)
        if asked.is_known:
            assert completion.token_ids == asked.token_ids
            assert completion.logprobs == pytest.approx(asked.logprobs, abs=1e-5)
        num_context = len(asked.prompt.token_ids)
        assert 0 <= completion.num_cached_tokens < num_context, "the last token is always read"
        context = asked.prompt.token_ids + completion.token_ids
        if len(context) + MOST_DRAWN <= LONGEST:
            self.contexts[asked.conversation] = context
        if asked.is_kept:
            self.resting[number] = replace(asked, token_ids=completion.token_ids)

    def abort(self, which):
        if not (numbers := sorted({*self.asked, *self.resting})):
            return
        number = numbers[which % len(numbers)]
        self.engine.abort([number])
        self.asked.pop(number, None)
        self.resting.pop(number, None)

    def drain(self):
        for number, completion in drained(self.engine).items():
            self.end(number, completion)

    # ── Weights and memory ───────────────────────────────────────────────────────────────────────────────

    def publish(self, drains):
        """New weights. What is under way goes on with them, after the tokens that it has."""
        if drains or self.sampling.temperature:
            self.drain()
        self.version += 1
        self.engine._suspend()  # reads what was drawn
        under_way = [
            asked for number, asked in self.asked.items() if number not in self.engine._submissions.ended
        ]
        for number, asked in self.asked.items():
            if asked in under_way:
                token_ids, logprobs = self.engine.progress(number)
                if asked.is_known:
                    assert token_ids == asked.token_ids[: len(token_ids)]
                asked.token_ids, asked.logprobs = token_ids, logprobs
        change_weights(self.models, self.version)
        self.engine.update_weights(self.version)
        assert not self.engine._cache.pool.has_names
        for asked in under_way:
            self.go_on_alone(asked)

    def sleep(self, keeps_bytes):
        self.engine.sleep(2**20 if keeps_bytes else 0)
        assert not self.engine._cache.pool.has_names
        self.engine.wake_up()

    def set_aside(self, publishes, length):
        """Others are generated meanwhile, from the beginning of a conversation maybe. Where the weights
        change, those that were set aside go on from keys and values of older ones: nobody else may."""
        aside = self.engine.set_aside()
        if publishes:
            self.version += 1
            change_weights(self.models, self.version)
            self.engine.update_weights(self.version)
            for asked in [*self.asked.values(), *self.resting.values()]:
                asked.is_known = False
        other = Prompt(BEGINNINGS[2][:length], 10_000, max_tokens=(3,))
        (own,), (alone,) = (x.generate([other], self.sampling) for x in (self.engine, self.alone))
        assert own.token_ids == alone.token_ids
        assert own.num_cached_tokens == 0, "generate reads every token"
        self.engine.take_back(aside)

    def switch_adapters(self):
        if not self.has_adapters:
            return
        self.drain()
        self.engine.abort(self.resting)
        self.resting.clear()
        self.are_adapters_on = not self.are_adapters_on
        for model in self.models:
            (
                model.base_model.enable_adapter_layers()
                if self.are_adapters_on
                else model.base_model.disable_adapter_layers()
            )

    def close(self):
        self.drain()
        assert not self.asked
        self.engine.abort(self.resting)
        assert_pages_are_counted(self.engine)
        assert self.engine._cache.pool.num_free == self.engine._cache.pool.num_pages
        self.engine.close()


token_ids = st.integers(0, VOCAB_SIZE - 1)
limits = st.integers(1, MOST_DRAWN)
asks = st.tuples(
    st.just("ask"),
    st.integers(0, len(BEGINNINGS) - 1),
    st.sampled_from([0, 0, 0, 1, 2, 7, 20]),
    st.lists(token_ids, max_size=6),
    st.lists(limits, min_size=1, max_size=3),
    st.booleans(),
)
polls = st.tuples(st.just("poll"), st.sampled_from([1, 3, 50]))
others = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 9), st.lists(token_ids, max_size=4), limits),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("sleep"), st.booleans()),
    st.tuples(st.just("set_aside"), st.booleans(), st.integers(1, 20)),
    st.tuples(st.just("switch_adapters")),
)
conversations = st.builds(
    Conversations,
    spare_pages=st.sampled_from([None, 0, 1, 4, 12]),
    page_size=st.sampled_from([1, 3, 4, 8]),
    max_num_seqs=st.integers(1, 5),
    steps_per_look=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 1.0]),
    has_adapters=st.booleans(),
)


@settings(max_examples=EXAMPLES)
@given(
    conversations=conversations,
    steps=st.lists(st.tuples(asks, polls, asks, polls, others), min_size=6, max_size=10),
)
def test_whatever_is_found_each_turn_is_as_alone(conversations, steps):
    for name, *values in (part for step in steps for part in step):
        getattr(conversations, name)(*values)
        assert_pages_are_counted(conversations.engine)
    conversations.close()


# ── One thing at a time ──────────────────────────────────────────────────────────────────────────────────


def found_and_right(engine, prompt: Prompt, **options) -> int:
    """The tokens that are found of a prompt; what is drawn behind them is what `generate` draws."""
    (number,) = engine.submit([prompt], SamplingParams(MOST_DRAWN), **options)
    completion = drained(engine)[number]
    engine.abort([number])
    (alone,) = engine.generate([prompt], SamplingParams(MOST_DRAWN))
    assert completion.token_ids == alone.token_ids
    assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    return completion.num_cached_tokens


def test_the_next_turn_reads_what_is_new_from_the_last_whole_page_on(monkeypatch):
    engine, sampling = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=256), SamplingParams(6)
    (prompt,) = make_prompts([10])
    pressure = Pressure(monkeypatch)

    def num_read(token_ids: tuple[int, ...]) -> tuple[int, Completion]:
        before = pressure.num_prefilled_tokens
        (number,) = engine.submit([replace(prompt, token_ids=token_ids)], sampling)
        completion = drained(engine)[number]
        assert completion.num_cached_tokens == len(token_ids) - (pressure.num_prefilled_tokens - before)
        return pressure.num_prefilled_tokens - before, completion

    num_first, first = num_read(prompt.token_ids)
    assert num_first == 10
    # Of 10 + 6 tokens the last was never fed, so that three pages are full.
    whole = prompt.token_ids + first.token_ids
    assert num_read((*whole, 7, 7, 7))[0] == 16 + 3 - 12
    assert num_read(whole[:12])[0] == 4, "all is there, but the logits after the last token are wanted"
    assert num_read((*whole[:7], 96 - whole[7]))[0] == 4, "another last token makes another page"
    assert num_read((96 - whole[0], *whole[1:12]))[0] == 12, "equal pages behind another first one are others"


@pytest.mark.parametrize("precision", ["fp8_kv", "fp8"])
@pytest.mark.parametrize("grows", [False, True])
def test_pages_in_8_bits_are_found_with_what_belongs_to_them(precision, grows):
    """A conversation on found pages, two in a page's middle and over a growing cache, is as one read anew."""
    options = dict(page_size=4, rollout_precision=precision)
    model, sampling = make_model("qwen3"), SamplingParams(6)
    engine = awake(model, kv_cache_tokens=None if grows else 256, **options)
    context = make_prompts([10])[0].token_ids
    for turn in range(4):
        prompt = Prompt(context, turn, range(2))
        numbers = engine.submit([prompt], sampling)
        turns = drained(engine)
        fresh = awake(model, **options)
        expected = fresh.generate([prompt], sampling)
        fresh.close()
        for number, other in zip(numbers, expected, strict=True):
            assert turns[number].token_ids == other.token_ids
            # With products in 8 bits, what one rounding moves is rounded again by every later product.
            tolerance = ONE_ROUNDING * (10 if precision == "fp8" else 1)
            assert turns[number].logprobs == pytest.approx(other.logprobs, abs=tolerance)
        # The last token of a turn is never fed, and three are given after it.
        num_found = turns[numbers[0]].num_cached_tokens
        assert num_found == (0 if turn == 0 else (len(context) - 3 - 1) // 4 * 4)
        context += (*turns[numbers[0]].token_ids, 1, 2, 3)


def test_groups_that_begin_alike_share_what_is_being_read():
    """Both come at once; each has members, and pages of its own from where they differ on."""
    engine = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=512)
    (prompt,) = make_prompts([11], 3)
    other = replace(prompt, token_ids=(*prompt.token_ids[:9], 5, 6), key=7)
    numbers, sampling = engine.submit([prompt, other], SamplingParams(MOST_DRAWN)), SamplingParams(MOST_DRAWN)
    turns = drained(engine)
    assert [turns[number].num_cached_tokens for number in numbers] == [0] * 3 + [8] * 3
    expected = engine.generate([prompt, other], sampling)
    assert [turns[number].token_ids for number in numbers] == [x.token_ids for x in expected]


@pytest.mark.parametrize("forget", ["update", "sleep", "sleep_that_keeps_memory"])
def test_of_what_was_before_nothing_is_found(forget):
    engine = awake(model := make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    (prompt,) = make_prompts([13])
    assert [found_and_right(engine, prompt) for _ in range(2)] == [0, 12]
    if forget == "update":
        change_weights([model], 1)
        engine.update_weights(1)
    else:
        engine.sleep(2**30 if forget == "sleep_that_keeps_memory" else 0)
        engine.wake_up()
    assert [found_and_right(engine, prompt) for _ in range(2)] == [0, 12]


def test_pages_that_older_weights_have_filled_in_part_are_nobody_elses():
    """A sequence goes on over an update with its pages. Who begins as it does reads all anew."""
    engine = awake(model := make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    (prompt,) = make_prompts([13])
    (number,) = engine.submit([replace(prompt, max_tokens=(20,))], SamplingParams(20), keep=True)
    for _ in range(8):
        engine.poll()
    aside = engine.set_aside()
    change_weights([model], 1)
    engine.update_weights(1)
    engine.take_back(aside)
    assert {*drained(engine)[number].versions} == {0, 1}, "it has not gone on"
    engine.abort([number])
    assert [found_and_right(engine, prompt) for _ in range(2)] == [0, 12]


def test_what_is_set_aside_under_one_version_is_found():
    engine = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    (prompt,) = make_prompts([13])
    engine.submit([prompt], SamplingParams(MOST_DRAWN))
    engine.poll()
    engine.take_back(engine.set_aside())
    drained(engine)
    assert found_and_right(engine, prompt) == 12


def test_each_set_of_adapters_has_pages_of_its_own():
    engine = awake(model := make_lora("qwen3"), page_size=4, kv_cache_tokens=256)
    (prompt,) = make_prompts([13])
    assert found_and_right(engine, prompt) == 0
    model.base_model.disable_adapter_layers()
    assert found_and_right(engine, prompt) == 0
    model.base_model.enable_adapter_layers()
    assert found_and_right(engine, prompt) == 12, "they are there still"


def test_a_stop_within_a_window_leaves_no_page_with_a_token_that_was_never_fed():
    """Pages are taken for a window of steps; the stop token ends the sequence on the first place of one."""
    engine = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    engine._backend = Windowed(8)
    (prompt,) = make_prompts([10])
    (free,) = engine.generate([prompt], SamplingParams(12))
    for length in range(1, 12):
        stop = free.token_ids[length - 1]
        if stop in free.token_ids[: length - 1]:
            continue
        engine.submit([prompt], SamplingParams(12, stop_token_ids=(stop,)))
        drained(engine)
        longer = replace(prompt, token_ids=(*prompt.token_ids, *free.token_ids[:length], 1, 2, 3, 4))
        assert found_and_right(engine, longer) == (10 + length - 1) // 4 * 4
        engine.sleep()
        engine.wake_up()


def test_what_was_to_be_read_when_an_error_came_is_not_found(monkeypatch):
    engine = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    (prompt,) = make_prompts([13])

    def fail(runner, items):
        raise RuntimeError("injected")

    (number,) = engine.submit([prompt], SamplingParams(MOST_DRAWN))
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill", fail)
        with pytest.raises(RuntimeError, match="injected"):
            engine.poll()
    assert_pages_are_counted(engine)
    engine.abort([number])
    assert found_and_right(engine, prompt) == 0


def test_generate_reads_every_token_and_leaves_nothing():
    engine = awake(make_model("qwen3"), page_size=4, kv_cache_tokens=256)
    prompts = make_prompts([13, 9], 2)
    first = engine.generate(prompts, SamplingParams(MOST_DRAWN))
    assert not engine._cache.pool.has_names
    for prompt in prompts:
        engine.submit([prompt], SamplingParams(MOST_DRAWN))
    drained(engine)
    assert engine._cache.pool.has_names
    # Bit for bit, log-probs too: a run that is resumed has no cache that it could find anything in.
    assert engine.generate(prompts, SamplingParams(MOST_DRAWN)) == first


@pytest.mark.parametrize("has_room", [True, False])
def test_a_cache_that_grows_with_a_conversation_takes_no_more_memory_and_keeps_what_it_has(
    monkeypatch, has_room
):
    """On a CPU the old pages are copied, where there is memory for both."""
    model, context = make_model("qwen3"), make_prompts([9])[0].token_ids
    engine, other = awake(model, page_size=4), awake(model, page_size=4)
    usable = capacity._usable_bytes
    if not has_room:
        monkeypatch.setattr(
            capacity, "_usable_bytes", lambda held, device: usable(held, device) if held else 0.0
        )
        for each in (engine, other):  # the first pages of all are taken from nothing
            each._cache.allocate(1, torch.float32, torch.device("cpu"))
    for turn in range(5):
        prompt = Prompt(context, turn, max_tokens=(8,))
        (number,) = engine.submit([prompt], SamplingParams(8))
        completion = drained(engine)[number]
        (expected,) = other.generate([prompt], SamplingParams(8))
        assert completion.token_ids == expected.token_ids
        assert completion.num_cached_tokens == (
            0 if turn == 0 or not has_room else (len(context) - 3 - 1) // 4 * 4
        )
        assert engine.kv_cache_bytes == other.kv_cache_bytes
        context += (*completion.token_ids, 1, 2, 3)


@given(
    tokens=st.lists(st.integers(0, 2), max_size=12),
    other=st.lists(st.integers(0, 2), max_size=12),
    page_size=st.integers(1, 4),
)
def test_names_are_equal_where_all_tokens_are_up_to_there(tokens, other, page_size):
    prefixes = PrefixCache(PagePool(0), page_size, b"salt")
    names, others = prefixes.names(tokens), prefixes.names(other)
    assert len(names) == len(tokens) // page_size
    for page, (name, another) in enumerate(zip(names, others, strict=False)):
        end = (page + 1) * page_size
        assert (name == another) == (tokens[:end] == other[:end])
    for num_known in range(len(names)):
        assert prefixes.names(tokens, names[:num_known]) == names
    salted = PrefixCache(PagePool(0), page_size, b"pepper").names(tokens)
    assert not {*names} & {*salted}
