"""How soon a server counts as lost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """What a trainer waits for until it gives a server up."""

    answer_s: float = 60.0
    """Deadline of requests that take the server no work."""
    silence_s: float = 15.0
    """Seconds without an answer after which a server that generates is asked how it is."""
    max_attempts: int = 5
    """How often a request is sent."""
    first_delay_s: float = 0.25
    """Pause before a request is sent again; it doubles each time."""
    message_s: float = float("inf")
    """Seconds for a piece of the weights."""
    poll_s: float = 0.02
    """Seconds for which `poll` waits for a first turn to end until whoever polls sees to other things."""
    num_pushes: int = 1
    """Pushes of weights at once: all their chunks together take the memory of one."""
    has_substitute: bool = False
    """Others can do its work. Then whatever is wrong with it is no reason to stop: not even another model
    that it came back with."""


ALONE = Patience()
"""With the only server that there is."""


def patience_among(num_servers: int) -> Patience:
    """The patience with one of several servers. One that is gone refuses at once and is given up in half a
    second; one that is only busy may take seconds to say how it is."""
    return Patience(
        answer_s=4.0,
        silence_s=1.0,
        max_attempts=3,
        first_delay_s=0.1,
        message_s=20.0,
        poll_s=0.02 / num_servers,
        num_pushes=num_servers,
        has_substitute=True,
    )
