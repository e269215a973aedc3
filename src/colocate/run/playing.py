"""The players of a run's episodes: tools, environments, a function of the user's, or none of these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import datasets

from colocate.config.grpo_config import GRPOConfig
from colocate.data.encoding import CONTINUE
from colocate.data.order import SOURCE_COLUMN
from colocate.data.sampler import PromptBatches
from colocate.data.splits import EvalDataset, TrainDataset, check_datasets, evaluation_sets
from colocate.engines.base import RolloutEngine
from colocate.engines.native.engine import NativeEngine
from colocate.episodes.environments import EMPTY_PROMPT, EnvironmentPool
from colocate.episodes.renderer import Renderer
from colocate.episodes.tool_runner import ToolRunner
from colocate.episodes.tools import Toolbox
from colocate.experience.players.carry_over import CarryingPlayer
from colocate.experience.players.episode_player import EpisodePlayer
from colocate.experience.players.play import Player, SingleTurnPlayer
from colocate.experience.players.rollout_function import FunctionPlayer, RolloutFunc
from colocate.experience.requests import RequestBuilder
from colocate.http.key import key_from_environment
from colocate.parallel.mesh import Mesh
from colocate.rewards.arguments import check_columns
from colocate.run.options import BatchOptions, PlayerOptions
from colocate.serving.installed import check_installed
from colocate.types import SamplingParams
from colocate.users_code.exits import LoudExits

if TYPE_CHECKING:
    from colocate.experience.players.agent_player import AgentPlayer


@dataclass(frozen=True)
class Playing:
    """`GRPOTrainer`'s arguments `tools`, `environment_factory`, `rollout_func` and `agent`, checked."""

    toolbox: Toolbox = field(default_factory=Toolbox)
    environments: EnvironmentPool | None = None
    rollout_func: RolloutFunc | None = None
    agent: Callable[..., Any] | None = None
    runners: list[AbstractContextManager[Any]] = field(default_factory=list)
    """Runners of tools or agents for the players that were built."""
    given: dict[str, Any] = field(default_factory=dict)
    """The arguments as they were passed, by name."""

    @property
    def has_turns(self) -> bool:
        """True if episodes may have several turns, and given tokens in them."""
        return self.calls_tools or self.rollout_func is not None or self.agent is not None

    @property
    def calls_tools(self) -> bool:
        """True if tools are called here, and not by a user's program."""
        return bool(self.toolbox) or self.environments is not None

    @property
    def reward_functions(self) -> list[Callable[..., Any]]:
        """The environments' own."""
        return [] if self.environments is None else self.environments.reward_functions

    @property
    def columns(self) -> tuple[str, ...]:
        """Arguments of reward functions besides the dataset's columns."""
        return () if self.environments is None else ("environments",)

    @contextmanager
    def tools_at_work(self) -> Iterator[None]:
        """A context that ends all threads of tools, unless it is within another such context. If something
        ends the process within it, a message says so."""
        with ExitStack() as stack:
            stack.enter_context(LoudExits())
            for runner in self.runners:
                stack.enter_context(runner)
            yield

    def toolboxes(self) -> list[Toolbox]:
        """All toolboxes that episodes may have."""
        return [self.toolbox] if self.environments is None else list(self.environments.toolboxes.values())

    def schemas_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The schemas of the tools of a row's episodes; None: it has no tools."""
        toolbox: Toolbox | None = self.toolbox
        if self.environments is not None:
            boxes = self.environments.toolboxes
            toolbox = boxes[None] if None in boxes else boxes.get(row.get("environment"))
        return toolbox.schemas or None if toolbox else None


PLAIN = Playing()
"""Episodes of a single turn."""


@LoudExits()
def playing_of(
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: Any,
    rollout_func: Callable[[list[Any], Any], dict[str, Any]] | None,
    agent: Callable[..., Any] | None,
    args: GRPOConfig,
    trainer: Any,
) -> Playing:
    """Look at the tools and construct the first environments; `trainer` is passed to `rollout_func`."""
    for name, func in (("rollout_func", rollout_func), ("agent", agent)):
        if func is not None and (tools or environment_factory is not None):
            raise ValueError(
                f"{name} plays whole episodes itself, so `tools` and `environment_factory` would have no "
                "effect. Pass either it or them."
            )
        if func is not None and not callable(func):
            raise ValueError(f"{name}={func!r:.100} cannot be called.")
    if rollout_func is not None and agent is not None:
        raise ValueError("rollout_func and agent play whole episodes, each in its way. Pass one of the two.")
    toolbox = Toolbox(tools or ())
    environments = None
    if environment_factory is not None:
        environments = EnvironmentPool(
            environment_factory, tools or (), args.tool_workers, args.tool_timeout_s
        )
    given = dict(tools=tools, environment_factory=environment_factory, rollout_func=rollout_func, agent=agent)
    if rollout_func is None:
        return Playing(toolbox, environments, None, agent, given=given)
    return Playing(toolbox, environments, lambda prompts: rollout_func(prompts, trainer), given=given)


def check_mesh(playing: Playing, mesh: Mesh, decode_shard: int | None) -> None:
    """Raises ValueError if ranks are to decode together, and episodes have turns, which end on each rank at
    times of their own."""
    together = decode_shard or mesh.num_weight_parts
    if playing.has_turns and playing.rollout_func is None and mesh.num_weight_parts > 1 and together > 1:
        raise ValueError(
            f"The weights are split over {mesh.num_weight_parts} processes, of which {together} decode "
            "together, but not while tools answer at different times on each. Set decode_shard=1: every "
            "process gathers all weights for a rollout. Or set shard=1: every process has all weights, and a "
            "part of the optimizer's state."
        )


def datasets_of(
    train_dataset: TrainDataset | None,
    eval_dataset: EvalDataset | None,
    reward_funcs: Any,
    args: GRPOConfig,
    playing: Playing,
) -> tuple[TrainDataset, EvalDataset | None]:
    """The datasets with the columns that reward functions are to see, and with prompts where environments
    provide these."""
    if train_dataset is None and playing.environments is not None:  # an environment has the data
        check_own_data(playing.environments, args)
        train_dataset = datasets.Dataset.from_list([{"prompt": EMPTY_PROMPT}] * num_prompts_of(args))
    elif train_dataset is not None:
        train_dataset = with_prompts(train_dataset, playing)
    if isinstance(eval_dataset, dict):
        eval_dataset = {name: with_prompts(part, playing) for name, part in eval_dataset.items()}
    elif eval_dataset is not None:
        eval_dataset = with_prompts(eval_dataset, playing)
    train_dataset, eval_dataset = check_datasets(
        train_dataset,
        eval_dataset,
        args,
        apply_chat_template=bool(args.apply_chat_template),
        kept_columns=("prompt", SOURCE_COLUMN) if args.dataset_weights else ("prompt",),
    )
    if playing.rollout_func is None and playing.agent is None:  # which may return any column
        only_prompts = bool(args.remove_unused_columns)
        for dataset in (train_dataset, *evaluation_sets(eval_dataset).values()):
            columns = dataset.column_names
            check_columns(reward_funcs, columns, only_prompts=only_prompts, provided=playing.columns)
    return train_dataset, eval_dataset


def check_own_data(environments: EnvironmentPool, args: GRPOConfig) -> None:
    """Raises ValueError if a run without a dataset does not know its environments or its length."""
    if not environments.is_one:
        raise ValueError(
            "A dict environment_factory requires a `train_dataset` whose column `environment` names one of "
            f"{', '.join(map(repr, environments.toolboxes))} in each row. Pass one, or a single factory."
        )
    if args.max_steps <= 0:
        raise ValueError(
            "Without a train_dataset the environment brings the prompts, and nothing says how long to train: "
            f"max_steps={args.max_steps} must be set to a positive value."
        )


def num_prompts_of(options: BatchOptions | GRPOConfig) -> int:
    """The unique prompts of a generation batch."""
    assert options.generation_batch_size and options.num_generations, "GRPOConfig derives them"
    return options.generation_batch_size // options.num_generations


def with_prompts(dataset: TrainDataset, playing: Playing) -> TrainDataset:
    """The dataset with an empty message as each prompt, where it has none and environments provide these."""
    if playing.environments is None or "prompt" in next(iter(dataset), {"prompt": EMPTY_PROMPT}):
        return dataset
    return dataset.map(lambda row: {"prompt": EMPTY_PROMPT})


def build_player(
    playing: Playing,
    engine: RolloutEngine,
    sampling: SamplingParams,
    requests: RequestBuilder,
    batches: PromptBatches,
    options: PlayerOptions,
) -> Player:
    """The player that a run needs."""
    if options.max_policy_lag:
        lag, engine = options.max_policy_lag, check_carry_over(playing, engine, options)
        player, held_out = (_episode_player(playing, engine, sampling, requests, options) for _ in range(2))
        return CarryingPlayer(player, held_out, engine, batches, requests, lag)
    if options.mask_stale_tokens:
        raise ValueError(
            "mask_stale_tokens=True leaves tokens of older weights out of the loss, and with "
            "max_policy_lag=0 there are none. Set max_policy_lag to at least 1."
        )
    if playing.rollout_func is not None:
        return FunctionPlayer(engine, sampling, playing.rollout_func, requests.tokenizer)
    if playing.agent is not None:
        return _agent_player(playing, engine, sampling, requests, options)
    return _episode_player(playing, engine, sampling, requests, options)


def check_carry_over(playing: Playing, engine: RolloutEngine, options: PlayerOptions) -> NativeEngine:
    """The engine, if it can begin batches ahead."""
    lag = options.max_policy_lag
    asked = f"max_policy_lag={lag} lets completions go on over an update of the weights, but"
    if not isinstance(engine, NativeEngine):
        raise ValueError(
            f"{asked} {type(engine).__name__} completes what it was asked for. Set engine='native', or "
            "max_policy_lag=0."
        )
    if engine.num_weight_parts > 1:
        raise ValueError(
            f"{asked} {engine.num_weight_parts} processes share the weights and complete rollouts together. "
            "Set decode_shard=1 or shard=1, or max_policy_lag=0."
        )
    if playing.rollout_func is not None or playing.agent is not None:
        name = "rollout_func" if playing.agent is None else "agent"
        raise ValueError(
            f"{asked} `{name}` plays whole episodes. Pass `tools` or `environment_factory`, or set "
            "max_policy_lag=0."
        )
    if options.max_refill_rounds:
        raise ValueError(
            f"{asked} max_refill_rounds={options.max_refill_rounds} chooses the next prompts when a rollout "
            "is scored. Set one of the two to 0."
        )
    return engine


def _episode_player(
    playing: Playing,
    engine: RolloutEngine,
    sampling: SamplingParams,
    requests: RequestBuilder,
    options: PlayerOptions,
) -> SingleTurnPlayer | EpisodePlayer:
    """The player of episodes that the engine draws and tools or environments answer."""
    if not playing.has_turns:
        return SingleTurnPlayer(engine, sampling)
    check_whole_messages(options)
    renderer = Renderer(requests.tokenizer, options.chat_template_kwargs, sampling.stop_token_ids)
    if any(playing.toolboxes()):
        renderer.check_tools()
        check_room(playing, requests, sampling)
    runner = ToolRunner(options.tool_timeout_s, options.tool_workers)
    playing.runners.append(runner)
    return EpisodePlayer(
        engine,
        sampling,
        renderer,
        runner,
        tokenize=requests.tokenize,
        toolbox=playing.toolbox,
        environments=playing.environments,
        max_tool_calling_iterations=options.max_tool_calling_iterations,
        context_length=requests.context_length,
    )


def _agent_player(
    playing: Playing,
    engine: RolloutEngine,
    sampling: SamplingParams,
    requests: RequestBuilder,
    options: PlayerOptions,
) -> AgentPlayer:
    """The player of episodes that an agent of the user's plays through an endpoint."""
    check_installed("agent")
    from colocate.experience.players.agent_player import AgentPlayer
    from colocate.serving.texts import Texts

    assert playing.agent is not None, "that is why it is asked for"
    check_whole_messages(options)
    texts = Texts(requests.tokenizer, sampling.stop_token_ids, options.chat_template_kwargs)
    player = AgentPlayer(
        engine,
        sampling,
        playing.agent,
        texts,
        context_length=requests.context_length,
        timeout_s=options.agent_timeout_s,
        port=0 if options.agent_port is None else options.agent_port + options.process_index,
        key=key_from_environment(),
    )
    playing.runners.append(player)
    return player


def check_whole_messages(options: PlayerOptions) -> None:
    """Raises ValueError if the model is to continue messages, in episodes of several turns."""
    if (options.chat_template_kwargs or {}).get(CONTINUE):
        raise ValueError(
            f"chat_template_kwargs={{{CONTINUE!r}: True}} lets the model continue a prompt's last message, "
            "but with tools, environments or an agent a turn is a whole message. Leave it out."
        )


def check_room(playing: Playing, requests: RequestBuilder, sampling: SamplingParams) -> None:
    """Raises ValueError if no call of any tool fits into a completion."""
    sizes = {
        name: len(requests.tokenizer(json.dumps({"name": name, "arguments": {}}))["input_ids"])
        for toolbox in playing.toolboxes()
        for name in toolbox.names
    }
    name, size = min(sizes.items(), key=lambda item: item[1])
    if size > sampling.max_tokens:
        raise ValueError(
            f"max_completion_length={sampling.max_tokens} bounds all tokens after a prompt, calls of tools "
            f"and what these answer among them, but the shortest call, of {name!r} without arguments, "
            f"takes {size} already. Raise max_completion_length."
        )
