"""The turns that vLLM is drawing, which come and go one by one between its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colocate.engines.turns import Turn
from colocate.engines.vllm import internals
from colocate.engines.vllm.requests import LLMRequest, llm_requests
from colocate.types import Completion, SamplingParams

STEPS_PER_DRAW = 8
"""Steps of vLLM until the caller of `poll` gets control back; fewer if a turn ends before."""


class OpenTurns:
    """Turns on their way through vLLM's scheduler.

    vLLM's prefix cache, if it is on, has the keys and values of an episode's earlier turns.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests: dict[str, tuple[int, LLMRequest]] = {}

    def draw(
        self, waiting: Mapping[int, Turn], sampling: SamplingParams, policy_version: int
    ) -> dict[int, Completion]:
        """Let vLLM take a few steps on the turns that wait, and return those that have ended.

        Args:
            waiting: all turns to draw, by the numbers of their sequences; those under way are among them.
        """
        under_way = {number for number, _ in self._requests.values()}
        for number, turn in waiting.items():
            if number not in under_way:
                (request,) = llm_requests([turn.as_prompt()], sampling)
                name = f"sequence-{number}-turn-{turn.number}"
                internals.add_request(self._llm, name, request.prompt, request.params())
                self._requests[name] = number, request
        ended: dict[int, Completion] = {}
        for _ in range(STEPS_PER_DRAW):
            for name, output in internals.step(self._llm):
                number, request = self._requests.pop(name)
                ended[number] = request.completion(output, policy_version)
            if ended:
                break
        return ended

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """Take the turns of sequences back from vLLM; None: those of all. They can be drawn again."""
        gone = None if numbers is None else set(numbers)
        names = [name for name, (number, _) in self._requests.items() if gone is None or number in gone]
        for name in names:
            del self._requests[name]
        internals.abort_requests(self._llm, names)
