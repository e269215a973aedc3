"""Batches that are begun ahead: their tokens stay over updates, evaluations and a resumed run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_turns import OPTIONS as TURNS
from test_turns import SHORT_TURNS, always_calling, by_tokens, chat_model, questions
from transformers import DynamicCache

from colocate import GRPOTrainer
from colocate.episodes.episode import Episode, Row
from colocate.types import Sample
from tiny import logged, make_model, make_trainer, sums, train, unexplained
from tool_chat import add

RAGGED: dict[str, Any] = dict(
    engine="native",
    max_policy_lag=1,
    num_generations=4,
    per_device_train_batch_size=8,
    max_completion_length=24,
    max_num_seqs=8,
    max_steps=4,
    shuffle_dataset=False,
    learning_rate=0.003,
    generation_kwargs={"stop_token_ids": list(range(10, 20))},
)
"""Two groups of four, whose lengths differ: a random model draws one of the ten about every tenth time."""


class Watch:
    """What a run has trained on, and the weights of every version."""

    def __init__(self, trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = trainer
        self.batches: list[tuple[int, list[Episode]]] = []
        """The version of the weights and the episodes of each scored batch."""
        self.keys: list[Sequence[int]] = []
        self.samples: list[list[Sample]] = []
        self.weights = {0: self._weights()}
        run = trainer.run
        score, update = run.judge.score, run.engine.update_weights

        def scored(request, episodes):
            rollout = score(request, episodes)
            if not request.is_held_out:
                self.batches.append((run.engine.policy_version, list(episodes)))
                self.keys.append([prompt.key for prompt in request.prompts])
                self.samples.append(rollout.samples)
            return rollout

        def updated(version):
            update(version)
            self.weights[version] = self._weights()

        monkeypatch.setattr(run.judge, "score", scored)
        monkeypatch.setattr(run.engine, "update_weights", updated)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    def lags(self) -> list[int]:
        """The lag of every sampled token of the run."""
        return [
            version - drawn
            for version, episodes in self.batches
            for episode in episodes
            for node in episode.nodes
            for drawn in node.policy_versions
        ]

    def check_logprobs(self, model: Any) -> int:
        """Each token's log-prob is that of the weights whose version it has, by transformers' forward and
        cache: on keys and values that older weights have left, or that were made anew after an update.

        Returns:
            How many completions have gone on with what older weights have left.
        """
        num_kept = 0
        for _, episodes in self.batches:
            for episode in episodes:
                (row,) = episode.rows()
                told, drawn = torch.tensor(row.logprobs), torch.tensor(row.is_sampled)
                num_updates = len(list(itertools.groupby(row.policy_versions))) - 1
                for kept in itertools.product([False, True], repeat=num_updates):
                    if torch.allclose(
                        told[drawn], self._logprobs(model, row, kept)[drawn], atol=1e-5, rtol=0
                    ):
                        num_kept += any(kept)
                        break
                else:
                    pytest.fail(f"{row} was not drawn by these weights")
        return num_kept

    @torch.no_grad()
    def _logprobs(self, model: Any, row: Row, kept: Sequence[bool]) -> torch.Tensor:
        """[C] log-probs of a row; `kept` says of each update whether keys and values were kept over it."""
        ids, cache, num_read, found = torch.tensor(row.prompt_ids + row.completion_ids), DynamicCache(), 0, []
        num_drawn = len(row.prompt_ids)
        for is_kept, (version, tokens) in zip(
            [True, *kept], itertools.groupby(row.policy_versions), strict=True
        ):
            if not is_kept:
                cache, num_read = DynamicCache(), 0
            first = num_drawn
            num_drawn += len(list(tokens))
            model.load_state_dict(self.weights[version], strict=False)
            # A token is read when the next one is drawn.
            logits = model(ids[None, num_read : num_drawn - 1], past_key_values=cache).logits[0]
            of_following = logits.log_softmax(-1).gather(1, ids[num_read + 1 : num_drawn, None])[:, 0]
            found.append(of_following[first - num_drawn :])
            num_read = num_drawn - 1
        return torch.cat(found)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_tokens_are_as_old_as_they_say_and_at_most_the_lag(tmp_path, monkeypatch, lag):
    options = {**RAGGED, "max_policy_lag": lag, "max_num_seqs": 8 * (lag + 1)}
    trainer = make_trainer(tmp_path, model=make_model(), train_dataset=sums(), **options)
    watch = Watch(trainer, monkeypatch)
    assert train(trainer)
    assert (watch.check_logprobs(make_model()) > 0) == (lag > 0)
    assert watch.keys == [[0, 1], [2, 3], [4, 5], [6, 7]]  # the batches of a run without carry-over
    assert max(watch.lags()) == lag and min(watch.lags()) == 0
    assert (len(logged(trainer, "policy_lag/mean")) > 0) == (lag > 0)
    assert unexplained(trainer) == set()
    if lag:
        means = [
            sum(version - drawn for e in episodes for drawn in e.nodes[0].policy_versions)
            / sum(len(e.nodes[0].policy_versions) for e in episodes)
            for version, episodes in watch.batches
        ]
        assert logged(trainer, "policy_lag/mean") == pytest.approx(means)


def test_the_rows_stay_full(tmp_path):
    """With lengths that differ, as many tokens take fewer decode steps."""

    def steps(lag: int) -> tuple[int, float]:
        options = {**RAGGED, "max_policy_lag": lag, "max_steps": 8, "learning_rate": 0.0}
        trainer = make_trainer(tmp_path / str(lag), model=make_model(), train_dataset=sums(16), **options)
        num_steps = 0
        from colocate.engines.native.decoder import Decoder

        step = Decoder.step

        def counted(decoder, *arguments):
            nonlocal num_steps
            num_steps += 1
            step(decoder, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "step", counted)
            assert trainer.train()
        return num_steps, sum(logged(trainer, "completions/mean_length"))

    (without, tokens), (carried, same_tokens) = steps(0), steps(2)
    # At a learning rate of 0 all weights are equal: a token's draw does not depend on when it is drawn.
    assert tokens == same_tokens
    assert carried < 0.8 * without


def test_stale_tokens_can_be_left_out_of_the_loss(tmp_path, monkeypatch):
    trainer = make_trainer(
        tmp_path, model=make_model(), train_dataset=sums(), mask_stale_tokens=True, **RAGGED
    )
    watch = Watch(trainer, monkeypatch)
    assert train(trainer)
    assert 1 in watch.lags()
    for (version, episodes), samples in zip(watch.batches, watch.samples, strict=True):
        for episode, sample in zip(episodes, samples, strict=True):
            fresh = [float(drawn == version) for drawn in episode.nodes[0].policy_versions]
            assert sample.completion_mask.tolist() == fresh


def final_weights(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_evaluation_in_between_changes_nothing(tmp_path):
    options = {**RAGGED, "train_dataset": sums()}
    alone = make_trainer(tmp_path / "a", model=make_model(), **options)
    evaluated = make_trainer(
        tmp_path / "b",
        model=make_model(),
        eval_dataset=sums(3),
        eval_strategy="steps",
        eval_steps=1,
        **options,
    )
    assert train(alone) and train(evaluated)
    assert len(logged(evaluated, "eval_reward")) == 4
    assert_equal(final_weights(alone), final_weights(evaluated))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_run_goes_on_exactly_with_unfinished_completions(tmp_path, lag, caplog):
    options = {**RAGGED, "max_policy_lag": lag, "train_dataset": sums(), "max_steps": 5}
    options |= {"save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", model=make_model(), **options)
    train(whole)
    again = make_trainer(tmp_path / "again", model=make_model(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(final_weights(whole), final_weights(again))
    assert "differ from the policy's" not in caplog.text, "as older weights have drawn what was unfinished"


def test_what_was_begun_is_begun_anew_where_it_was_drawn_otherwise(tmp_path):
    options = {**RAGGED, "train_dataset": sums(), "save_strategy": "steps", "save_steps": 2}
    train(make_trainer(tmp_path, model=make_model(), **options))
    for changes in ({"temperature": 0.5}, {"max_policy_lag": 0}, {"max_policy_lag": 2}):
        again = make_trainer(tmp_path, model=make_model(), **{**options, **changes, "max_steps": 5})
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert again.state.global_step == 5
        lags = logged(again, "policy_lag/mean")
        assert not lags or lags[-1] > 0


class Scene:
    """An environment of up to four turns, which knows in what order it was used."""

    def reset(self, n: int, **row: Any) -> None:
        self.n, self.num_turns, self.done = n, 0, False

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.num_turns += 1
        self.done = self.num_turns == 3
        return str(self.n)


@pytest.mark.parametrize("play", [{"tools": [add]}, {"environment_factory": Scene}])
def test_episodes_of_several_turns_are_begun_ahead_too(tmp_path, monkeypatch, play):
    always_calling(monkeypatch)
    seen: list[tuple[Any, ...]] = []

    def reward(completion_ids, n, environments=(), **columns) -> list[float]:
        seen.extend((m, scene.n, scene.num_turns) for m, scene in zip(n, environments, strict=False))
        return by_tokens(completion_ids)

    options: dict[str, Any] = {
        **RAGGED,
        **TURNS,
        "generation_kwargs": SHORT_TURNS,
        "max_completion_length": 160,
        "max_tool_calling_iterations": 3,
        "per_device_train_batch_size": 8,
    }
    arguments = {**options, **play, "train_dataset": questions(16), "reward_funcs": reward}
    trainer = make_trainer(tmp_path, model=chat_model(), **arguments)
    watch = Watch(trainer, monkeypatch)
    assert train(trainer)
    assert watch.check_logprobs(chat_model()) > 0
    assert set(watch.lags()) == {0, 1}
    assert max(len(episode.nodes) for _, episodes in watch.batches for episode in episodes) > 2
    # Reward functions look at environments as their own episode has left them.
    assert all(row == scene for row, scene, _ in seen)
    assert "tools" in play or len(seen) == 32
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, model=chat_model(), **{**arguments, **saves, "max_steps": 2}).train()
    again = make_trainer(tmp_path, model=chat_model(), **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"engine": "transformers"},
            "TransformersEngine completes what it was asked for. Set engine='native'",
        ),
        ({"max_refill_rounds": 2}, "max_refill_rounds=2 chooses the next prompts"),
        ({"rollout_func": lambda prompts, trainer: {}}, "`rollout_func` plays whole episodes"),
        ({"agent": lambda row, endpoint: None}, "`agent` plays whole episodes"),
        ({"max_policy_lag": 0, "mask_stale_tokens": True}, "Set max_policy_lag to at least 1"),
        ({"max_policy_lag": -1}, "max_policy_lag"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make_trainer(tmp_path, **{**RAGGED, **options})
