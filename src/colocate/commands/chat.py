"""`colocate chat`: a conversation with a trained model, on a terminal or through pipes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import (
    MODEL_HELP,
    add_command,
    add_loading,
    loading_options,
    positive,
    temperature,
)
from colocate.version import __version__

if TYPE_CHECKING:
    from colocate.checkpoints.saved_model import SavedModel
    from colocate.inference.conversation import Conversation
    from colocate.inference.loading import LoadedModel

SUMMARY = "talk to a trained model"
_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it.\nCtrl-C stops an answer."
_PROMPT = "> "


def add_parser(commands: Any) -> None:
    details = (
        f". On a terminal: {_HELP} In a pipe each line is a message, and answers are all that is printed."
    )
    command = add_command(commands, "chat", "MODEL [options]", SUMMARY, details)
    add = command.add_argument
    add("model", help=MODEL_HELP)
    add("--system_prompt", help="the first message (default: that of the run)")
    add(
        "--temperature",
        type=temperature,
        default=1.0,
        help="0 is greedy (default: %(default)s, as in training)",
    )
    add("--top_p", type=float, default=1.0, help="draw from the likeliest tokens only")
    add(
        "--max_tokens",
        type=positive,
        help="tokens of an answer (default: max_completion_length of the run, or 512)",
    )
    add(
        "--max_context",
        type=positive,
        default=16384,
        help="tokens of the whole conversation, for which memory is taken (default: %(default)s, or fewer "
        "if the model has fewer)",
    )
    add(
        "--raw",
        action="store_true",
        help="use no chat template: each message is a prompt that the model continues",
    )
    add_loading(command)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        print(f"colocate {__version__} chat {known.model}", flush=True)
    from colocate.checkpoints.saved_model import find_model

    saved = find_model(known.model, known.base)

    from colocate.inference.loading import load

    loaded = load(saved, loading_options(known), is_any_base=known.any_base)
    conversation = _conversation(loaded, known)
    if is_terminal:
        _introduce(loaded, conversation)
    if not is_terminal:
        for text in _piped():
            _answer(conversation, text)
        return 0
    for text in _typed(conversation.clear):
        try:
            _answer(conversation, text)
        except ValueError as error:  # such as a conversation that is too long: the next may be shorter
            print(error)
    return 0


def _conversation(loaded: LoadedModel, known: argparse.Namespace) -> Conversation:
    from colocate.engines.turns import TurnEngine
    from colocate.episodes.renderer import Renderer
    from colocate.inference.conversation import Conversation
    from colocate.types import SamplingParams

    tokenizer, stops = loaded.tokenizer, loaded.stop_token_ids
    renderer = None
    is_raw = known.raw or loaded.saved.options.get("apply_chat_template") is False
    if tokenizer.chat_template and not is_raw:
        renderer = Renderer(tokenizer, loaded.config.chat_template_kwargs, stops)
    system_prompt = known.system_prompt
    if system_prompt is None and renderer is not None:
        system_prompt = loaded.saved.options.get("system_prompt")
    context_length = min(known.max_context, loaded.context_length)
    of_run = int(loaded.saved.options.get("max_completion_length") or 512)
    sampling = SamplingParams(
        max_tokens=min(known.max_tokens or of_run, context_length),
        temperature=known.temperature,
        top_p=known.top_p,
        stop_token_ids=stops,
        seed=known.seed,
    )
    engine = loaded.make_engine(sampling, kv_cache_tokens=context_length)
    room = getattr(engine, "num_cache_tokens", context_length)
    if room < context_length:
        print(
            f"Memory has room for a conversation of {room:,} tokens, of {context_length:,}.", file=sys.stderr
        )
        context_length = room
    return Conversation(
        engine,
        tokenizer,
        renderer,
        sampling,
        context_length=context_length,
        system_prompt=system_prompt,
        # Such an engine reads the whole conversation again for each piece.
        tokens_per_piece=64 if isinstance(engine, TurnEngine) else 8,
    )


def _introduce(loaded: LoadedModel, conversation: Conversation) -> None:
    saved: SavedModel = loaded.saved
    if saved.adapter is not None:
        print(f"An adapter on {saved.base}.")
    if conversation.has_turns:
        print(_HELP)
    else:
        print(f"Without a chat template: the model continues each text, and remembers none. {_HELP}")


def _typed(clear: Callable[[], None]) -> Iterator[str]:
    """Lines typed on a terminal, without the commands among them, which are carried out."""
    import readline  # noqa: F401  # arrow keys in `input`

    while True:
        try:
            text = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        if text == "/exit":
            return
        if text == "/clear":
            clear()
            print("Forgotten.")
        elif text == "/help":
            print(_HELP)
        elif text:
            yield text


def _piped() -> Iterator[str]:
    """The lines of standard input that are not empty."""
    for line in sys.stdin:
        if text := line.strip():
            yield text


def _answer(conversation: Conversation, text: str) -> None:
    """Print an answer while it is drawn. The first Ctrl-C ends it, a second one the program."""
    noting: AbstractContextManager[list[int]] = _noting_interrupt() if sys.stdin.isatty() else nullcontext([])
    with noting as interrupts:
        pieces = conversation.ask(text)
        for piece in pieces:
            print(piece, end="", flush=True)
            if interrupts:
                print(" [stopped]", end="")
                break
        pieces.close()
    print(flush=True)


@contextmanager
def _noting_interrupt() -> Iterator[list[int]]:
    """Note the first Ctrl-C, so that it stops no computation half-way; the second one interrupts as usual."""
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
