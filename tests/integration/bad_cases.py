"""Bad inputs and what each may end in.

- clear: an error of a kind that says what is wrong, with its name (and the value, file or line), or on
  the command line one such message and exit code 1;
- accepted: the input is legitimate, and means what its documentation says;
- raw: an error that does not say what to change, or a traceback;
- wrong: accepted although it means nothing, or changed without a word;
- hang: not decided after `LIMIT_S`.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 300.0
"""Seconds of wall time. A case takes two, and many times that on a busy machine."""
OUTCOMES = ("clear", "accepted", "raw", "wrong", "hang")


class Hang(BaseException):
    pass


def words_of(error: BaseException) -> str:
    """The text of an error; a user's own may have none."""
    try:
        return str(error)
    except Exception:
        return "no words"


@dataclass
class Case:
    kind: str
    what: str
    do: Callable[[], Any]
    must_name: tuple[str, ...]
    """What a clear error has in it: of each "a|b", one."""
    accepts: Callable[[Any], bool] = lambda _: False
    """Whether what `do` returns may be returned."""
    must_fail: bool = False
    """Nothing that it could return is right."""
    errors: tuple[type[BaseException], ...] = (ValueError, TypeError)
    """The kinds of clear errors."""
    longest_error: int = 1500

    def outcome(self) -> tuple[str, str]:
        """The outcome, and the error or the result in words."""

        def expire(*_: Any) -> None:
            raise Hang

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            result = self.do()
        except Hang:
            return "hang", ""
        except self.errors as error:
            words = words_of(error)
            named = all(any(part in words for part in one.split("|")) for one in self.must_name)
            is_clear = named and len(words) < self.longest_error
            return "clear" if is_clear else "raw", f"{type(error).__name__}: {words}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return "raw", f"{type(error).__name__}: {words_of(error)}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return ("accepted" if not self.must_fail and self.accepts(result) else "wrong"), repr(result)[:200]


def judge(cases: Iterable[Case], title: str, capsys: Any) -> tuple[Counter, str]:
    """Try all cases and print a table.

    Returns:
        The number of cases by outcome, and a line for each that ended badly.
    """
    total: Counter[str] = Counter()
    counts: dict[str, Counter] = {}
    found = []
    for case in cases:
        outcome, detail = case.outcome()
        counts.setdefault(case.kind, Counter())[outcome] += 1
        total[outcome] += 1
        if outcome in ("raw", "wrong", "hang"):
            found.append(f"{outcome}: {case.kind}: {case.what}: {detail[:300]}")
            with capsys.disabled():
                print(found[-1], flush=True)
    report = "\n".join(found)
    lines = [f"\n{title}", f"{'':32}" + "".join(f"{name:>10}" for name in (*OUTCOMES, "all"))]
    for kind, counter in {**counts, "all": total}.items():
        row = [*(counter[name] for name in OUTCOMES), counter.total()]
        lines.append(f"{kind:32}" + "".join(f"{number:10,}" for number in row))
    with capsys.disabled():
        print("\n".join(lines))
    return total, report
