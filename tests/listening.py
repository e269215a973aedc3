"""On which addresses processes listen, and what docs/security.md says about it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
LOOPBACK, EVERY, OWN = "`127.0.0.1`", "every address", "the node's own"


def said_of(mode: str) -> set[str]:
    """The kinds of addresses in the page's row of the mode that begins so."""
    (row,) = [row for row in rows() if row[0].startswith(mode)]
    said = row[1].partition(";")[0].partition(":")[0]
    found = {kind for kind in (LOOPBACK, EVERY, OWN) if kind in said}
    assert found or said == "nothing", row
    return found


def rows() -> list[list[str]]:
    """The cells of the table of what listens where."""
    table = PAGE.partition("## What listens where")[2].partition("\n\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in lines]


def sockets(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports that these processes listen on."""
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            connections = psutil.Process(pid).net_connections(kind="inet")
            found |= {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
    return found  # type: ignore[return-value]


def kinds_of(found: Iterable[tuple[str, int]]) -> set[str]:
    """The kinds of these addresses, in the page's words."""
    kinds = set()
    for host, _ in found:
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        kinds.add(LOOPBACK if address.is_loopback else EVERY if address.is_unspecified else OWN)
    return kinds
