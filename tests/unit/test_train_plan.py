"""What is tried after memory ran out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import LARGE_SHAPES, LORA_SHAPES, on_gpu

from colocate.memory.train_plan import ACTIVATION_POLICIES, TrainPlan
from colocate.memory.workload import Workload
from colocate.policy.footprint import train_rows
from colocate.weights.shapes import ModelShapes


def moments(shapes: ModelShapes, load: Workload, plan: TrainPlan) -> dict[str | None, int]:
    sizes: dict[str | None, int] = {}
    for row in train_rows(shapes, load, plan):
        sizes[row.moment] = sizes.get(row.moment, 0) + row.size_bytes
    return sizes


@settings(max_examples=40)
@given(
    shapes=st.sampled_from([LARGE_SHAPES, LORA_SHAPES]),
    policy=st.sampled_from(ACTIVATION_POLICIES),
    budget=st.none() | st.integers(1, 200_000),
    sequences=st.integers(1, 64),
    chunk=st.integers(1, 8192),
    lengths=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
)
def test_every_chain_ends_and_each_plan_takes_less_than_the_one_before(
    shapes, policy, budget, sequences, chunk, lengths
):
    # So many sequences that no micro-batch is a whole step, which would find no gradients there.
    load = on_gpu(prompt_tokens=lengths[0], completion_tokens=lengths[1], num_step_sequences=100_000)
    longest = load.max_sequence_length
    chunk = min(chunk, lengths[1])  # larger ones than there are tokens to predict cost nothing
    plan = TrainPlan(policy, budget, sequences, chunk)
    for _ in range(64):
        smaller = plan.smaller(longest)
        if smaller is None:
            break
        before, after = moments(shapes, load, plan), moments(shapes, load, smaller)
        assert all(after[moment] <= before[moment] for moment in before), (plan, smaller)
        assert sum(after.values()) < sum(before.values()), (plan, smaller)
        plan = smaller
    assert plan.smaller(longest) is None
    assert plan.activation_policy == "offload"
    assert plan.budget(longest) <= longest


def test_the_kept_softmax_goes_first():
    plan = TrainPlan("keep", 32768, keep_softmax=True)
    assert plan.smaller(3000) == TrainPlan("keep", 32768)


def test_layers_that_follow_no_policy_are_given_none():
    plan = TrainPlan("keep", 8192).smaller(3000, has_layers=False)
    assert plan == TrainPlan("keep", 4096)


def test_the_order_of_what_is_given_up():
    plan: TrainPlan | None = TrainPlan("keep", 32768, logprob_chunk_size=128)
    chain = []
    while plan is not None:
        chain.append((plan.activation_policy, plan.tokens_per_microbatch, plan.logprob_chunk_size))
        plan = plan.smaller(3000)
    assert chain == [
        ("keep", 32768, 128),
        ("keep", 16384, 128),
        ("keep", 8192, 128),
        ("selective", 8192, 128),
        ("full", 8192, 128),
        ("offload", 8192, 128),
        ("offload", 4096, 128),
        ("offload", 3000, 128),
        ("offload", 3000, 64),
    ]
