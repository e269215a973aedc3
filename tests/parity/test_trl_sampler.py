"""The prompts of every batch are those that TRL's samplers and accelerate's sharding give."""

import datasets
import pytest
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset

from colocate.data.sampler import PromptBatches, rank_slice


def numbered_rows(num_rows):
    return datasets.Dataset.from_dict({"prompt": [str(i) for i in range(num_rows)], "row": range(num_rows)})


def visited(batches):
    return [row["row"] for batch in batches for row in batch.rows]


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 40),
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    num_epochs=st.integers(1, 4),
)
def test_order_is_that_of_repeat_sampler(num_rows, num_prompts, seed, shuffle, num_epochs):
    dataset = numbered_rows(num_rows)
    if num_prompts > num_rows:
        with pytest.raises(ValueError, match=rf"{num_rows} prompts, but .* needs {num_prompts}"):
            PromptBatches(dataset, num_prompts, seed=seed)
        return
    sampler = RepeatSampler(dataset, mini_repeat_count=1, batch_size=num_prompts, shuffle=shuffle, seed=seed)
    expected = [row for _ in range(num_epochs) for row in sampler]
    batches = PromptBatches(dataset, num_prompts, shuffle=shuffle, seed=seed, num_epochs=num_epochs)
    assert batches.num_batches_per_epoch == len(sampler) // num_prompts
    assert visited(batches) == expected


@settings(max_examples=20)
@given(
    num_rows=st.integers(3, 30),
    num_prompts=st.integers(1, 3),
    num_shards=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    shuffle=st.booleans(),
)
def test_stream_order_is_that_of_repeat_iterable_dataset(num_rows, num_prompts, num_shards, seed, shuffle):
    stream = numbered_rows(num_rows).to_iterable_dataset(num_shards=num_shards)
    theirs = repeat_iterable_dataset(
        stream.shuffle(seed=seed) if shuffle else stream, mini_repeat_count=1, batch_size=num_prompts
    )
    expected = []
    for epoch in range(3):
        theirs.set_epoch(epoch)
        expected += [row["row"] for row in theirs]
    assert visited(PromptBatches(stream, num_prompts, shuffle=shuffle, seed=seed, num_epochs=3)) == expected


@settings(max_examples=60)
@given(
    per_rank=st.integers(1, 12),
    world_size=st.integers(1, 5),
    num_generations=st.integers(1, 8),
    num_batches=st.integers(1, 3),
    stream=st.booleans(),
)
def test_rank_slice_is_the_part_that_trls_data_loader_gives(
    per_rank, world_size, num_generations, num_batches, stream
):
    total = per_rank * world_size
    if total % num_generations:
        total *= num_generations
    num_prompts = total // num_generations
    dataset = numbered_rows(num_prompts * num_batches)
    batches = list(PromptBatches(dataset, num_prompts, seed=3, num_epochs=1))
    for rank in range(world_size):
        sampler = RepeatSampler(dataset, num_generations, batch_size=num_prompts, seed=3)
        size = total // world_size
        if stream:
            flat = list(
                IterableDatasetShard(list(sampler), size, num_processes=world_size, process_index=rank)
            )
        else:
            shard = BatchSamplerShard(BatchSampler(sampler, size, False), world_size, rank)
            flat = [row for batch in shard for row in batch]
        parts = rank_slice(num_prompts, num_generations, rank, world_size)
        ours = [batch.rows[prompt]["row"] for batch in batches for prompt, members in parts for _ in members]
        assert ours == flat


def test_evaluation_visits_every_prompt_in_trls_order():
    dataset = numbered_rows(10)
    theirs = list(RepeatSampler(dataset, mini_repeat_count=1, seed=42))
    assert visited(PromptBatches(dataset, 4, seed=42, num_epochs=1, drop_last=False)) == theirs
