"""The plan of several GPUs: bytes against published arithmetic and real splits, seconds against measurements,
and the choice of t against each t asked for alone."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from engine_models import FAMILIES, config_of
from test_planner import GIB, LARGE_SHAPES, allocated, on_gpu, size_of, workload
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from colocate.config.grpo_config import GRPOConfig
from colocate.memory.train_plan import TrainPlan
from colocate.memory.workload import Sharding
from colocate.planning.communication import all_reduce_s, exchange_s, gathers_s, link_bytes_per_s
from colocate.planning.hardware import Cluster, find_gpu
from colocate.planning.memory_plan import account, train_bytes
from colocate.planning.planner import Case, Constraints, Planner, choose_train_plan, plan
from colocate.planning.remedies import enough_gpus, find_remedies, with_adapters
from colocate.planning.run_options import cluster_of, sharding_choice
from colocate.planning.sharding import NUM_WEIGHT_PARTS, WORTH_A_SPLIT, obstacle, with_sharding
from colocate.planning.speed import expected_speed, step_time_of
from colocate.weights.layouts import WeightPart, layout_for
from colocate.weights.shapes import FourBit, Lora, ModelShapes
from colocate.weights.weight_parts import split_weights, storage_of, why_not_split
from tiny import shapes_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H100, H200 = find_gpu("H100"), find_gpu("H200")


def qwen(hidden, mlp, layers, heads, kv_heads, vocab=152064):
    return shapes_of(
        Qwen2Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=False,
        )
    )  # fmt: skip


MODELS = {
    "7B": qwen(3584, 18944, 28, 28, 4),
    "14B": qwen(5120, 13824, 48, 40, 8),
    "32B": qwen(5120, 27648, 64, 40, 8),
    "72B": qwen(8192, 29568, 80, 64, 8),
}

QLORA = replace(MODELS["32B"].with_lora(Lora(16)), four_bit=FourBit())


def under(num_ranks, num_weight_parts=1, shapes=LARGE_SHAPES, load=None, **changes):
    """The workload of one of so many ranks."""
    return with_sharding(shapes, load or on_gpu(**changes), Sharding(num_ranks, num_weight_parts))


def case(name="7B", num_gpus=8, gpu=H100, num_nodes=1, shard="auto", **changes):
    cluster = Cluster(num_gpus, num_nodes, gpu)
    load = on_gpu(prompt_tokens=512, completion_tokens=1024, **changes)
    return Case(MODELS[name], load, int(gpu.memory_gib * GIB), Constraints(shard=shard), cluster)


# ── Bytes ────────────────────────────────────────────────────────────────────────────────────────────────

# 2 P / t + 16 P / N with AdamW in float32 | 2 P / t + 10 P / N with 8-bit moments, in 10^9 bytes, for P of
# 7.62, 14.77, 32.76 and 72.71 × 10^9.
TABLE = """
7B 1: 2 76|53 4 46|34 8 30|25 16 23|20
14B 1: 2 148|103 4 89|66 8 59|48 16 44|39
14B 2: 2 133|89 4 74|52 8 44|33 16 30|24
32B 1: 4 197|147 8 131|106 16 98|86
32B 4: 4 147|98 8 82|57 16 49|37
72B 8: 8 164|109 16 91|64
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_what_a_rank_holds_at_its_step_is_the_published_arithmetic(line):
    name, parts, rest = re.fullmatch(r"(\w+) (\d): (.*)", line).groups()
    for num_ranks, full, in_8bit in re.findall(r"(\d+) (\d+)\|(\d+)", rest):
        for optim, published in (("adamw_torch_fused", full), ("adamw_bnb_8bit", in_8bit)):
            load = under(int(num_ranks), int(parts), MODELS[name], optim=optim)
            result = account(MODELS[name], load, TrainPlan())
            sizes = [size_of(result, row) for row in ("weights", "float32 masters", "moments")]
            held_gb = (sum(sizes) + size_of(result, "gradients", "step")) / 1e9
            # The table counts 8-bit moments without their scales, which are 1 / 64 more.
            assert held_gb == pytest.approx(
                int(published),
                abs=0.5
                + 0.032 * MODELS[name].num_parameters / 1e9 / int(num_ranks) * (optim != "adamw_torch_fused"),
            ), (num_ranks, optim)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_are_what_splitting_a_model_gives(num_parts):
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model, shapes = AutoModelForCausalLM.from_config(config), shapes_of(config)
    num_ranks = 8
    split_weights(model, WeightPart(0, num_parts))
    assert ModelShapes.of(model) == shapes
    held = [storage_of(p).clone() for p in model.parameters()]
    masters = [p.chunk(num_ranks // num_parts)[0].clone() for p in held]
    load = replace(workload(parameter_dtype=torch.bfloat16), sharding=Sharding(num_ranks, num_parts))
    result = plan(shapes, load)
    assert size_of(result, "weights") == allocated([p.bfloat16() for p in held])
    assert size_of(result, "float32 masters") == allocated(masters)
    assert size_of(result, "moments") == 2 * allocated(masters)
    assert size_of(result, "gradients", "step") == allocated(masters)
    # Sums of micro-batches are as large as what is held, until the ranks have added them up.
    for moment in ("embedding", "reduce"):
        assert size_of(result, "gradients", moment) == allocated(held)
    # The ranks that decode together hold the sequences of all of them, each with its heads.
    cache = torch.empty(
        2,
        3,
        result.kv_cache_tokens // load.page_size,
        load.page_size,
        4 // num_parts,
        8,
        dtype=torch.bfloat16,
    )
    assert size_of(result, "KV cache") == cache.nbytes
    whole = plan(shapes, workload(parameter_dtype=torch.bfloat16, max_num_seqs=64))
    together = plan(shapes, replace(load, max_num_seqs=64))
    assert together.num_running == num_parts * whole.num_running
    assert size_of(together, "KV cache") == size_of(whole, "KV cache")


def test_whole_weights_are_there_while_they_are_used():
    shapes = MODELS["32B"]
    result = account(shapes, under(8, 4, shapes), TrainPlan(tokens_per_microbatch=8192))
    layer = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27648
    for moment in ("head", "layer", "embedding"):
        assert size_of(result, "gathered layers", moment) == 2 * 2 * layer
    assert size_of(result, "gathered head", "head") == 2 * 152064 * 5120
    assert size_of(result, "gradients on their way", "layer") == 2 * 2 * layer
    # Of the embedding's part each of two ranks gets a half, in float32.
    assert size_of(result, "reduced gradients", "reduce") == 4 * 152064 * 5120 // (4 * 2)
    names = {row.name for row in account(shapes, under(8, 8, shapes), TrainPlan()).rows}
    assert "reduced gradients" not in names  # nobody else holds this part
    frozen = shapes.with_lora(Lora(32))
    names = {row.name for row in account(frozen, under(8, 4, frozen), TrainPlan()).rows}
    assert "gathered layers" in names and "gradients on their way" not in names


def test_a_split_optimizer_is_away_until_its_step():
    shapes, load = MODELS["7B"], under(2, 1, MODELS["7B"])
    device = int(79.1 * GIB)
    chosen = choose_train_plan(shapes, load, device)
    assert chosen.offload_optimizer and plan(shapes, load, device_memory_bytes=device).fits
    here = plan(shapes, load, device_memory_bytes=device, constraints=Constraints(offload_optimizer=False))
    assert here.fits is False
    rows = account(shapes, load, chosen, device).rows
    assert {row.moment for row in rows if row.name in ("float32 masters", "moments")} == {"step"}
    # Held whole by every rank, it comes back before training, as that of one GPU.
    none = replace(load, sharding=Sharding(2, 1, splits_optimizer=False))
    alone = account(shapes, on_gpu(decode_scratch_bytes=none.decode_scratch_bytes), chosen, device)
    same = account(shapes, none, chosen, device)
    assert [row for row in same.rows if row.name != "NCCL" and row.phase == "train"] == [
        row for row in alone.rows if row.phase == "train"
    ]


# ── Seconds ──────────────────────────────────────────────────────────────────────────────────────────────


def result_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [("7B", (23, 32, 37)), ("14B", (45, 62, 72)), ("32B", (100, 138, 159)), ("72B", (221, 307, 352))],
)
def test_gathering_all_weights_takes_the_time_of_the_measured_bandwidth(name, milliseconds):
    for num_ranks, expected_ms in zip((2, 4, 8), milliseconds, strict=True):
        received = 2 * MODELS[name].num_parameters * (num_ranks - 1) / num_ranks
        assert 1e3 * received / link_bytes_per_s(H100, num_ranks) == pytest.approx(
            expected_ms, abs=0.5, rel=0.005
        )


def test_all_reduces_of_decode_steps_are_near_those_measured():
    records = [r for r in result_of("sharding-probe-h200x2")["repetitions"] if r.get("way") == "two_shot"]
    assert len(records) == 5
    for record in records:
        seconds = all_reduce_s(record["rows"] * record["hidden"] * 2, 2, H200)
        assert 1e6 * seconds == pytest.approx(record["us"], rel=0.06)


@pytest.mark.parametrize(("name", "tokens"), [("7b", 4096), ("7b", 16384), ("32b", 4096), ("32b", 16384)])
def test_fsdp2_exposes_its_messages_and_we_expect_less(name, tokens):
    records = [
        r for r in result_of("sharding-probe-h200x2")["repetitions"]
        if r["question"] == "layers" and (r["model"], r["tokens"], r["layout"]) == (name, tokens, "fused")
    ]  # fmt: skip
    seconds = {r["sharded"]: median(r["seconds"]) for r in records}
    # Four layers and nothing else, and gradients sent in float32, twice as wide as ours.
    shapes = replace(MODELS[name.upper()], num_layers=4, vocab_size=0)
    ours_s = gathers_s(shapes, under(2, 2, MODELS[name.upper()]), H200)
    assert seconds[True] - seconds[False] == pytest.approx(4 / 3 * ours_s, rel=0.35)
    whole, split = (
        1
        / expected_speed(
            shapes, load, account(shapes, load, TrainPlan("keep", tokens)), H200
        ).train_tokens_per_s
        for load in (under(2, 1, shapes), under(2, 2, shapes))
    )
    assert 1 < split / whole < seconds[True] / seconds[False]


MEASURED_SHAPES = {"1.5b": LARGE_SHAPES, "7b": MODELS["7B"]}


def test_rollouts_are_near_those_measured():
    errors = {}
    for record in result_of("rollout-h200")["repetitions"]:
        cases = record.get("cases", {}) if record.get("engine") == "native" else {}
        for name, measured in cases.items():
            if measured["lengths"] != "fixed":
                continue
            rows = measured["num_prompts"] * measured["num_generations"]
            lengths = {
                key: measured[key] for key in ("prompt_tokens", "completion_tokens", "num_generations")
            }
            load = on_gpu(num_step_sequences=rows, num_rollout_sequences=rows, **lengths)
            shapes = MEASURED_SHAPES[measured["model"]]
            expected = expected_speed(shapes, load, plan(shapes, load, device_memory_bytes=140 * GIB), H200)
            tokens_per_s = median(r["tokens_per_s"] for r in measured["repetitions"])
            errors[name] = expected.rollout_tokens_per_s / tokens_per_s
    assert len(errors) == 4
    assert all(0.85 < error < 1.2 for error in errors.values()), errors


@pytest.mark.parametrize("label", ["1p5b-native-1024", "1p5b-native-256", "1p5b-native-64", "7b-native-512"])
def test_steps_of_two_gpus_are_near_those_measured(label):
    (record,) = (r for r in result_of("modes-h200x2")["repetitions"] if r["label"] == label)
    work = record["work"]
    shapes = MEASURED_SHAPES[work["model"]]
    shapes = shapes.with_lora(Lora(work["lora_rank"], "all-linear")) if work["lora_rank"] else shapes
    rows = work["num_prompts"] * work["num_generations"] // 2
    load = on_gpu(
        prompt_tokens=work["prompt_tokens"], completion_tokens=work["new_tokens"],
        num_generations=work["num_generations"], num_step_sequences=rows, num_rollout_sequences=rows,
    )  # fmt: skip
    load = replace(load, sharding=Sharding(2, splits_optimizer=False))
    result = plan(shapes, load, device_memory_bytes=int(H200.memory_gib * GIB))
    expected = step_time_of(shapes, load, result, Cluster(2, 1, H200))
    phases = {
        name: median(step["phases_s"][name] for step in record["steps"][1:]) for name in ("rollout", "train")
    }
    # Of few rows the engine is slower than the roofline: its host is what takes the time.
    assert phases["rollout"] / (1.9 if rows < 64 else 1.35) < expected.rollout_s < 1.2 * phases["rollout"]
    assert expected.train_s + expected.exchange_s == pytest.approx(phases["train"], rel=0.2)


@pytest.mark.parametrize(
    "label", ["7b-t1", "7b-t2", "1p5b-1gpu", "1p5b-2gpu-none", "1p5b-2gpu", "1p5b-2gpu-half"]
)
def test_phases_of_split_runs_are_near_those_measured(label):
    (record,) = (r for r in result_of("sharded-h200x2")["repetitions"] if r.get("label") == label)
    work, num_ranks = record["work"], record["world_size"]
    shapes, shard = MEASURED_SHAPES[work["model"]], record["options"].get("shard", "none")
    rows = work["num_prompts"] * work["num_generations"] // num_ranks
    load = on_gpu(
        prompt_tokens=work["prompt_tokens"], completion_tokens=work["new_tokens"],
        num_generations=work["num_generations"], num_step_sequences=rows, num_rollout_sequences=rows,
    )  # fmt: skip
    sharding = Sharding(num_ranks, splits_optimizer=False) if shard == "none" else Sharding(num_ranks, shard)
    load = with_sharding(shapes, load, sharding)
    result = plan(shapes, load, device_memory_bytes=int(H200.memory_gib * GIB))
    expected = step_time_of(shapes, load, result, Cluster(num_ranks, 1, H200))
    steps = record["steps"][record["num_warm_up"] :]
    rollout_s, train_s = (median(step["phases_s"][name] for step in steps) for name in ("rollout", "train"))
    assert expected.rollout_s == pytest.approx(rollout_s, rel=0.2)
    assert expected.train_s + expected.exchange_s == pytest.approx(train_s, rel=0.2)


def test_nodes_exchange_once_a_step_over_the_network():
    shapes = MODELS["72B"]
    for num_nodes, seconds in ((2, 0.61), (4, 0.91), (8, 1.06)):
        load = under(8 * num_nodes, 8, shapes)
        result = account(shapes, load, TrainPlan())
        cluster = Cluster(8 * num_nodes, num_nodes, H100)
        # (4 + 2) × P / 8 bytes at 45 GB/s for each GPU.
        assert exchange_s(shapes, load, result, cluster) == pytest.approx(seconds, rel=0.01)
    # In a node it is the time of the links; with whole weights all cards of a node carry the ring.
    within = exchange_s(shapes, under(8, 1, shapes), result, Cluster(8, 1, H100))
    assert within == pytest.approx(6 * shapes.num_parameters * 7 / 8 / 360e9, rel=0.01)
    assert exchange_s(shapes, under(8, 8, shapes), result, Cluster(8, 1, H100)) == 0
    across = exchange_s(shapes, under(16, 1, shapes), result, Cluster(16, 2, H100))
    assert across == pytest.approx(6 * shapes.num_parameters * 15 / 16 / 360e9, rel=0.01)


# ── The choice ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_gpus", [2, 8])
@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.share(2)
def test_the_choice_is_the_fastest_that_fits_of_each_asked_for_alone(name, num_gpus, gpu):
    asked = case(name, num_gpus, gpu)
    chosen = asked.sharding_choice(asked.cluster).chosen
    alone = {}
    for parts in NUM_WEIGHT_PARTS:
        forced = replace(asked, constraints=Constraints(shard=parts))
        try:
            alone[parts] = forced.sharding_choice(forced.cluster).chosen
        except ValueError as refusal:
            assert f"shard={parts}" in str(refusal)
    assert alone[chosen.sharding.num_weight_parts] == chosen and asked.plan() == chosen.plan
    safe = [way for way in alone.values() if way.plan.fits and way.plan.is_safe]
    if safe:
        assert chosen in safe
        assert chosen.step_s <= (1 + WORTH_A_SPLIT) * min(way.step_s for way in safe)
    else:
        fitting = [way for way in alone.values() if way.plan.fits]
        least = min(way.plan.peak_bytes for way in alone.values())
        assert chosen in fitting if fitting else chosen.plan.peak_bytes == least
    # A node of two cannot have four parts, and 7B has four key-value heads.
    assert set(alone) == {
        parts for parts in NUM_WEIGHT_PARTS if num_gpus % parts == 0 and (name != "7B" or parts < 8)
    }


def test_what_is_chosen_for_known_models():
    def parts(*args, **changes):
        asked = case(*args, **changes)
        choice = asked.sharding_choice(asked.cluster)
        assert choice.chosen.plan.fits
        return choice.sharding.num_weight_parts

    assert parts("7B", 8) == 1 and parts("14B", 8, H200) == 1
    assert parts("32B", 8) > 1 and parts("72B", 16, H200, num_nodes=2) > 1
    assert case("72B", 8).plan().fits is False


@pytest.mark.parametrize(
    ("shapes", "changes", "num_gpus", "reason"),
    [
        (MODELS["7B"], {}, 8, "28 attention heads cannot be divided by 8"),
        (LARGE_SHAPES, {}, 8, "12 attention heads cannot be divided by 8"),
        (MODELS["32B"], {}, 4, "the 4 GPUs of a node cannot be divided into groups of 8"),
        (MODELS["32B"], dict(engine="vllm"), 8, "engine=vllm reads whole weights"),
        (QLORA, {}, 8, "weights in 4 bits are not split"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_the_arithmetic(shapes, changes, num_gpus, reason):
    asked = Case(shapes, on_gpu(**changes), 80 * GIB, Constraints(shard=8), Cluster(num_gpus, 1, H100))
    with pytest.raises(ValueError, match=re.escape(reason)) as refusal:
        asked.plan()
    possible = re.search(r"Set shard=auto, or one of ([\d, ]+)\.", str(refusal.value)).group(1)
    for parts in map(int, possible.split(", ")):
        replace(asked, constraints=Constraints(shard=parts)).plan()
    choice = replace(asked, constraints=Constraints()).sharding_choice(asked.cluster)
    assert choice.sharding.num_weight_parts != 8
    assert (reason in choice.reason) == (num_gpus == 8)


def test_gathered_weights_take_memory_in_rollouts_alone():
    """t = 4 and t' = 2: trained in quarters, decoded in halves, each with half of the key-value heads."""
    load = on_gpu(prompt_tokens=512, completion_tokens=1024)
    load = replace(load, sharding=Sharding(decode_shard=2))
    gathering = Case(MODELS["7B"], load, 80 * GIB, Constraints(shard=4), Cluster(4, 1, H100)).plan()
    together = [under(4, parts, MODELS["7B"], on_gpu()).of_engine.num_rollout_sequences for parts in (2, 4)]
    quarter, half = MODELS["7B"].part(4), MODELS["7B"].part(2)
    assert size_of(gathering, "weights") == quarter.weight_bytes(torch.bfloat16)
    assert size_of(gathering, "gathered weights") == half.weight_bytes(torch.bfloat16)
    assert gathering.kv_bytes_per_token == half.kv_bytes_per_token(torch.bfloat16)
    assert together == [2 * on_gpu().num_rollout_sequences, 4 * on_gpu().num_rollout_sequences]
    assert gathering.num_running == min(512, together[0])


def test_weights_are_gathered_only_where_they_can_be():
    load = replace(on_gpu(), sharding=Sharding(decode_shard=4))
    asked = Case(MODELS["7B"], load, 80 * GIB, Constraints(shard=2), Cluster(8, 1, H100))
    with pytest.raises(ValueError, match="decode_shard=4 does not divide 2"):
        asked.plan()
    choice = replace(asked, constraints=Constraints()).sharding_choice(asked.cluster)
    assert choice.sharding.num_weight_parts == 4
    adapted = replace(asked, shapes=MODELS["7B"].with_lora(Lora(16)), constraints=Constraints(shard=4))
    adapted.plan()  # at t' = t nothing is gathered
    load = replace(load, sharding=Sharding(decode_shard=2))
    with pytest.raises(ValueError, match="not possible beside adapters"):
        replace(adapted, workload=load).plan()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("vocab_size", [96, 97])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_the_plan_refuses_what_splitting_refuses(name, vocab_size, num_kv_heads):
    config = config_of(name, vocab_size=vocab_size, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    layout = layout_for(AutoModelForCausalLM.from_config(config))
    for parts in (2, 4, 8):
        refusal = obstacle(shapes_of(config), on_gpu(), Cluster(8, 1, H100), parts)
        assert (refusal is None) == (why_not_split(layout, parts) is None)


def test_without_a_known_gpu_the_fewest_parts_that_fit_are_taken():
    known = case("32B", 8, H200)
    unknown = replace(known, cluster=Cluster(8))
    fitting = {
        parts
        for parts in NUM_WEIGHT_PARTS
        if replace(unknown, constraints=Constraints(shard=parts)).plan().is_safe
    }
    assert unknown.sharding_choice(unknown.cluster).sharding.num_weight_parts == min(fitting) > 1
    on_cpu = replace(unknown, device_memory_bytes=None)
    assert on_cpu.sharding_choice(on_cpu.cluster).sharding.num_weight_parts == 1


# ── Remedies ─────────────────────────────────────────────────────────────────────────────────────────────


def test_remedies_are_found_for_all_gpus_together():
    short = case("72B", 8, H200)
    assert short.plan().fits is False
    (remedy,) = find_remedies(short, most=1)
    assert remedy.settings == "optim=adamw_bnb_8bit" and remedy.case.plan().fits
    cluster, choice = enough_gpus(short)
    assert cluster.num_gpus == 2 * 8 and cluster.num_nodes == 2 and choice.chosen.plan.fits
    fixed = case("32B", 8, H100, shard="none")
    assert find_remedies(fixed, most=1)[0].settings == "shard=auto"
    # Weights in 4 bits are whole, whatever was asked for.
    quantized = with_adapters(case("32B", 8, H100, shard=4), in_4bit=True)
    assert (
        quantized.plan().fits and quantized.sharding_choice(quantized.cluster).sharding.num_weight_parts == 1
    )


# ── A run ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_chooses_before_its_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", 8)
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, optim="adafactor")
    assert cluster_of(args) == Cluster(8, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cluster_of(args) == Cluster(8, 2)
    # On a CPU there is no memory to plan for, and so no reason to split the weights.
    choice = sharding_choice(LARGE_SHAPES, args, torch.float32)
    assert choice.sharding == Sharding(8, 1) and choice.sharding.num_optimizer_parts == 8


def test_a_measured_step_corrects_the_plan_where_tokens_were_its_peak():
    shapes = MODELS["7B"]
    planner = Planner(shapes, under(2, 1, shapes), int(79.1 * GIB))
    chosen = planner.plan().train_plan
    predicted = train_bytes(shapes, planner.workload, chosen, 1.0)
    assert chosen.offload_optimizer and planner.refine(chosen, predicted, chosen.budget(0)) == chosen
    smaller = planner.refine(chosen, int(1.2 * predicted), chosen.budget(0))
    assert smaller.budget(0) < chosen.budget(0) or smaller.activation_policy != chosen.activation_policy
    # The step of 72B on 8 GPUs is its peak, whatever the micro-batches.
    shapes = MODELS["72B"]
    planner = Planner(shapes, under(8, 8, shapes), int(139.8 * GIB))
    chosen = planner.plan().train_plan
    assert planner.refine(chosen, 2 * train_bytes(shapes, planner.workload, chosen, 1.0), 1024) == chosen
