"""Two processes with half the batch each train what one process with the whole batch trains."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_worker import CASES, NOTED, SPLIT_CASES, WIDE_CASES, build, build_wide, moments_of
from safetensors.torch import load_file
from small_runs import read_metrics, without_timings
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from colocate.checkpoints.sealed import list_checkpoints, verify
from processes import run_python, run_ranks

pytestmark = pytest.mark.early

WORKER = Path(__file__).with_name("grpo_worker.py")
CASES_OF_TWO = [
    *("dapo", "grpo", "refill", "carry_over", "waiting", "gathered", "resumed"),
    *("split", "from_one", "from_parts", "changed", "full_disk", "terminated", "evaluated"),
    *("counted", "rows_of_one", "rows_of_parts", "split_again", "4_bits", "wide", "best"),
]
# Without --multi_gpu it starts several processes by MPI only; the processes themselves run on the CPU.
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The directory where pairs of processes trained every case, and single trainers that did likewise."""
    directory = tmp_path_factory.mktemp("runs")
    single = {}
    for case in CASES:
        if case not in ("split", "rows", "accelerate"):
            single[case] = build(directory / "one", case, num_ranks=1)
            single[case].train()
    NOTED.clear()
    single["rows"] = build(directory / "one", "rows", num_ranks=1)
    single["rows"].train()
    single["prompts"] = list(NOTED)
    run_ranks(2, WORKER, directory, *CASES_OF_TWO, timeout_s=240)
    return directory, single


WHOLE_CASES = [
    pytest.param(case, marks=[pytest.mark.slow] if case == "accelerate" else [])
    for case in CASES
    if case not in (*SPLIT_CASES, "rows", "waiting")
]


@pytest.fixture
def case(request, runs) -> str:
    """One of those that both ranks have trained; that of accelerate's launcher begins here."""
    directory, single = runs
    if request.param == "accelerate" and "accelerate" not in single:
        run_python(*ACCELERATE, WORKER, directory, "accelerate", timeout_s=240)
        single["accelerate"] = build(directory / "one", "accelerate", num_ranks=1)
        single["accelerate"].train()
    return request.param


@pytest.mark.parametrize("case", WHOLE_CASES, indirect=True)
def test_two_processes_equal_one(runs, case):
    directory, single = runs
    expected = dict(single[case].model.named_parameters())
    start = dict(build(directory / "start", case, num_ranks=1).model.named_parameters())
    both = [torch.load(directory / case / f"params{rank}.pt") for rank in range(2)]
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert moved > 5e-3  # five hundred times the tolerance
    for name, parameter in expected.items():
        torch.testing.assert_close(both[0][name], parameter.data, rtol=0, atol=1e-5)
        assert torch.equal(both[0][name], both[1][name])  # or they drift apart, for nothing synchronises them


@pytest.mark.parametrize("case", WHOLE_CASES, indirect=True)
def test_the_record_covers_both_processes_once(runs, case):
    directory, single = runs
    records = read_metrics(directory / case)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]  # one line each: one process writes
    for record, expected in zip(records, read_metrics(single[case].args.output_dir), strict=True):
        assert record == pytest.approx(without_timings(expected), rel=1e-3, abs=1e-5, nan_ok=True)
    texts = [(directory / where / "completions.jsonl").read_text() for where in (case, f"one/{case}")]
    assert texts[0].count("\n") == texts[1].count("\n") > 0


def test_two_processes_replace_the_same_groups(runs):
    rounds = [record["refill/rounds"] for record in read_metrics(runs[0] / "refill")]
    assert max(rounds) > 0


def test_the_wait_for_the_slowest_process_is_told(runs):
    """It is done half a second after the other began to wait. One process waits for none."""
    directory, _ = runs

    def waited_s(output_dir: Path) -> list[float]:
        lines = (output_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("rank_wait_s", 0.0) for line in lines]

    waits_s = waited_s(directory / "waiting")
    assert len(waits_s) == 2 and all(seconds > 0.49 for seconds in waits_s)
    assert waited_s(directory / "one" / "waiting") == [0.0, 0.0]


def test_tokens_of_older_weights_are_trained_on_by_two_processes(runs):
    lags = [record["policy_lag/mean"] for record in read_metrics(runs[0] / "carry_over")]
    assert max(lags) > 0.5


def test_two_processes_that_gather_weights_to_decode_equal_one(runs):
    """They train on parts of the weights and begin batches ahead, for which a process must decode alone."""
    directory, single = runs
    saved = dict(
        AutoModelForCausalLM.from_pretrained(directory / "gathered", dtype="auto").named_parameters()
    )
    for name, parameter in single["gathered"].model.named_parameters():
        torch.testing.assert_close(saved[name].data, parameter.data, rtol=0, atol=1e-5)
    for record, expected in zip(
        read_metrics(directory / "gathered"), read_metrics(single["gathered"].args.output_dir), strict=True
    ):
        assert record["policy_lag/mean"] == expected["policy_lag/mean"]
        assert record["reward"] == pytest.approx(expected["reward"])


def test_an_evaluation_by_two_processes_is_that_of_one(runs):
    directory, _ = runs
    one = build(directory / "one", "evaluated", num_ranks=1)
    expected = [one.evaluate(one.train_dataset.select(range(n))) for n in (3, 1)]
    for actual, metrics in zip(json.loads((directory / "evaluated.json").read_text()), expected, strict=True):
        for name, value in metrics.items():
            if not name.endswith(("_runtime", "_per_second")):
                assert actual[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_two_processes_write_one_checkpoint(runs):
    directory, _ = runs
    sealed = list_checkpoints(directory / "resumed")
    assert [c.name for c in sealed] == ["checkpoint-3", "checkpoint-5"]
    for written in sealed:
        verify(written)
        assert {"rank0.pt", "rank1.pt"} <= {file.name for file in written.iterdir()}


def whole_state(optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in optimizer.tensors().items()}


def test_one_process_goes_on_from_two(runs, caplog):
    directory, _ = runs
    one = build(directory / "again", "resumed", num_ranks=1)
    written_by_two = directory / "resumed" / "checkpoint-3"
    one.load_checkpoint(written_by_two)
    # PyTorch's own tool reads the shards, without a trainer.
    dcp_to_torch_save(written_by_two / "shards", directory / "shards.pt")
    expected = torch.load(directory / "shards.pt")
    state = whole_state(one.policy.optimizer)
    assert state.keys() == expected.keys() and len(state) > 3 * len(list(one.model.parameters()))
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert one.state.global_step == 3 and "number of processes" in caplog.text
    assert "\n4 completions made under the former were waiting" in caplog.text  # two on either process


def test_dropped_completions_of_both_processes_are_told_once(runs):
    directory, _ = runs
    (message,), others = (json.loads((directory / f"told{rank}.json").read_text()) for rank in range(2))
    assert "option temperature" in message and "\n4 completions made under the former" in message
    assert others == []


def test_two_processes_go_on_from_one(runs):
    directory, _ = runs
    one = build(directory / "again", "resumed", num_ranks=1)
    one.load_checkpoint(directory / "one" / "resumed" / "checkpoint-3")
    expected = whole_state(one.policy.optimizer)
    for rank in range(2):
        state = torch.load(directory / f"from_one{rank}.pt")
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_parts_are_saved_as_a_whole_model(runs):
    directory, _ = runs
    saved = AutoModelForCausalLM.from_pretrained(directory / "split", dtype="auto")
    dcp_to_torch_save(directory / "split" / "checkpoint-5" / "shards", directory / "last.pt")
    expected = torch.load(directory / "last.pt")
    parameters = dict(saved.named_parameters())
    assert {f"weights/{name}" for name in parameters} == {name for name in expected if "weights/" in name}
    for name, parameter in parameters.items():
        assert torch.equal(parameter.data, expected[f"weights/{name}"]), name
    assert saved.config.architectures == [type(saved).__name__]


def test_a_run_with_parts_goes_on_bit_for_bit(runs):
    directory, _ = runs
    written = {}
    for case in ("split", "split_again"):
        dcp_to_torch_save(directory / case / "checkpoint-5" / "shards", directory / f"{case}.pt")
        written[case] = torch.load(directory / f"{case}.pt")
    whole, again = written["split"], written["split_again"]
    assert whole.keys() == again.keys() and len({name.split("/")[-1] for name in whole} & {"exp_avg_sq"}) == 1
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    texts = [(directory / case / "completions.jsonl").read_text() for case in written]
    assert texts[0] == texts[1] != ""


def prompts_of_ranks(directory: Path, case: str) -> list[list[str]]:
    """The prompts of each rollout, of both ranks together, sorted."""
    of_ranks = [json.loads((directory / f"{case}{rank}.json").read_text()) for rank in range(2)]
    return [sorted(a + b) for a, b in zip(*of_ranks, strict=True)]


def test_another_number_of_processes_goes_on_with_the_same_rows(runs):
    directory, single = runs
    expected = [sorted(prompts) for prompts in single["prompts"]]
    assert len(expected) == 5 and prompts_of_ranks(directory, "rows") == expected
    assert prompts_of_ranks(directory, "rows_of_one") == expected[2:]
    NOTED.clear()
    one = build(directory / "again", "rows", num_ranks=1)
    one.train(resume_from_checkpoint=str(directory / "rows" / "checkpoint-2"))
    assert [sorted(prompts) for prompts in NOTED] == expected[2:]
    # Three rows of an epoch's nine in each step, four completions of each, and none again before the next.
    epoch = [prompt for prompts in expected[:3] for prompt in prompts]
    assert len(set(epoch)) == 9 and all(epoch.count(prompt) == 4 for prompt in epoch)
    for name, parameter in single["rows"].model.named_parameters():
        other = one.model.get_parameter(name)
        torch.testing.assert_close(other.data, parameter.data, rtol=0, atol=1e-5)


def test_other_parts_go_on_with_the_same_rows(runs):
    """From the middle of a rollout, whose completions wait on."""
    lines = {}
    for case in ("split", "rows_of_parts"):
        read = (runs[0] / case / "completions.jsonl").read_text().splitlines()
        lines[case] = [(entry["step"], entry["prompt"]) for entry in map(json.loads, read)]
    assert lines["rows_of_parts"] == [line for line in lines["split"] if line[0] > 3] != []


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> dict[str, Any]:
    """One process that trains a wide model, by the case that it is compared with."""
    trainers = {}
    for case in ("offloaded", "8bit rows"):
        trainers[case] = build_wide(tmp_path_factory.mktemp("wide"), case, 1)
        trainers[case].train()
    return trainers | {"8bit parts": trainers["8bit rows"]}


# A moment between two of the 256 codes falls to either; parts of the weights have other blocks of 256 values.
LARGEST = {"offloaded": 1e-5, "8bit rows": 1e-3, "8bit parts": 1e-3}
SHARE = {"offloaded": 0.0, "8bit rows": 5e-3, "8bit parts": 1.0}


@pytest.mark.parametrize("case", WIDE_CASES)
def test_optimizers_in_8_bits_and_on_the_host_equal_one_process(runs, wide, case):
    saved = dict(AutoModelForCausalLM.from_pretrained(runs[0] / case, dtype="auto").named_parameters())
    start = dict(build_wide(runs[0] / "start", case, 1).model.named_parameters())
    total, num_apart, moved = 0, 0, 0.0
    for name, parameter in wide[case].model.named_parameters():
        apart = (saved[name] - parameter).abs()
        moved = max(moved, (parameter - start[name]).abs().max().item())
        total, num_apart = total + apart.numel(), num_apart + int((apart > 1e-5).sum())
        assert apart.max() < LARGEST[case], name
    assert moved > 5e-3
    assert num_apart <= SHARE[case] * total


def test_rows_of_moments_in_8_bits_are_those_of_one_process(runs, wide):
    expected = moments_of(wide["8bit rows"])
    ranks = [torch.load(runs[0] / f"8bit rows{rank}.pt") for rank in range(2)]
    assert expected.keys() == ranks[0].keys() and len(expected) > 10
    for name, moments in expected.items():
        for number, moment in enumerate(moments):
            found = torch.cat([rank[name][number] for rank in ranks])
            apart = (found - moment).abs() / moment.abs().max()
            assert (apart > 1e-4).float().mean() < 0.03, name  # those between two codes
            assert apart.max() < 0.03, name


def test_an_evaluation_with_parts_is_that_of_one(runs, wide):
    one = wide["offloaded"]
    expected = [one.evaluate(one.train_dataset.select(range(n))) for n in (3, 1)]
    for rank in range(2):
        found = json.loads((runs[0] / f"offloaded{rank}.json").read_text())
        for actual, metrics in zip(found, expected, strict=True):
            for name, value in metrics.items():
                if not name.endswith(("_runtime", "_per_second")):
                    assert actual[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_weights_in_4_bits_are_refused_to_be_split_and_stay_whole_by_themselves(runs):
    for rank in range(2):
        told, num_parts = json.loads((runs[0] / f"4bits{rank}.json").read_text())
        assert "shard=2 splits the weights" in told and "weights in 4 bits are not split" in told
        assert num_parts == 1


def test_whole_weights_go_on_from_parts_of_them(runs):
    directory, _ = runs
    one = build(directory / "again", "split", num_ranks=1, shard="auto")
    one.load_checkpoint(directory / "split" / "checkpoint-3")
    expected = whole_state(one.policy.optimizer)
    dcp_to_torch_save(directory / "split" / "checkpoint-3" / "shards", directory / "parts.pt")
    written = torch.load(directory / "parts.pt")
    for rank in range(2):
        state = torch.load(directory / f"from_parts{rank}.pt")
        assert state.keys() == expected.keys() == written.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor) and torch.equal(tensor, written[name]), name


@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_ends_with_the_weights_of_its_best_checkpoint(runs, parts):
    directory = runs[0] / f"best{parts}"
    ended, *steps = (
        load_file(path / "model.safetensors")
        for path in (directory, directory / "checkpoint-1", directory / "checkpoint-2")
    )
    same = [all(torch.equal(ended[name], tensor) for name, tensor in step.items()) for step in steps]
    assert same == [True, False] and ended.keys() == steps[0].keys()


@pytest.mark.slow  # two processes go on from one, and from parts, in every run
def test_four_processes_go_on_from_two_and_two_from_four(runs):
    directory, _ = runs
    run_ranks(4, WORKER, directory, "of_four", timeout_s=240)
    run_ranks(2, WORKER, directory, "from_four", timeout_s=240)
    written = {}
    for name in ("split", "of_four"):
        dcp_to_torch_save(directory / name / "checkpoint-3" / "shards", directory / f"{name}.pt")
        written[name] = torch.load(directory / f"{name}.pt")
    assert written["split"].keys() == written["of_four"].keys()
    states = [written["of_four"], *(torch.load(directory / f"from_four{rank}.pt") for rank in range(2))]
    for state in states:
        assert state.keys() == written["split"].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in written["split"].items())


def test_a_full_disk_of_one_rank_ends_all(runs):
    directory, _ = runs
    for rank in range(2):
        kind, message, _ = json.loads((directory / f"full_disk{rank}.json").read_text())
        assert kind == "CheckpointError" and "No space left on device: 'rank1.pt' (rank 1)" in message
    assert not [d for d in (directory / "full_disk").iterdir() if d.is_dir()]


def test_sigterm_to_one_rank_stops_all_at_the_same_step(runs):
    directory, _ = runs
    for rank in range(2):
        assert json.loads((directory / f"terminated{rank}.json").read_text()) == ["SystemExit", "143", 2]
    (sealed,) = list_checkpoints(directory / "terminated")
    assert sealed.name == "checkpoint-2"
    verify(sealed)


def test_a_step_has_as_few_exchanges_as_it_needs(runs):
    directory, _ = runs
    (few, counts), (many, counts_of_many) = json.loads((directory / "counted.json").read_text())
    assert many >= 2 * few and counts_of_many == counts  # the host waits for no micro-batch
    exchanges = {phase: Counter() for phase in counts}
    for phase, of_phase in counts.items():
        for kind, number in of_phase.items():
            if kind != "scalars":  # a gather is of either kind, by PyTorch's version
                exchanges[phase][kind.replace("_allgather_base_", "allgather_")] += number
    # Objects are gathered in two exchanges, of their sizes and of their bytes.
    assert exchanges == {
        "score": {"c10d::allgather_": 2},  # rewards, lengths, texts and metrics, together
        # What dealing must know of the samples, of which none moves here; the plan, whether all have got
        # through backward, gradients, their norm with the losses, whether all can step; the weights.
        "train": {"c10d::allgather_": 3, "c10d::allreduce_": 5},
        "between phases": {"c10d::allgather_": 2, "c10d::allreduce_": 1},  # metrics; signals to stop
    }
