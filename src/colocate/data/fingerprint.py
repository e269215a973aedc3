"""The fingerprint of a dataset, which tells it from another one by the content of its rows."""

from __future__ import annotations

import hashlib
from typing import Any

import datasets

MAX_ROWS = 100_000
"""The most rows that are read; of a larger dataset they are taken at equal distances, in a second or two."""
_CHUNK_ROWS = 1000


def fingerprint(dataset: datasets.Dataset | datasets.IterableDataset) -> dict[str, Any]:
    """`rows` (how many), `columns` and `digest`, 16 hexadecimal digits of the rows' content in their order.

    For a stream, only its columns are known.
    """
    columns = sorted(dataset.column_names or [])
    if isinstance(dataset, datasets.IterableDataset):
        return {"rows": None, "columns": columns, "digest": None}
    step = -(-len(dataset) // MAX_ROWS) or 1
    table = dataset.with_format("arrow")
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(dataset), _CHUNK_ROWS * step):
        chunk = table[range(start, min(start + _CHUNK_ROWS * step, len(dataset)), step)].to_pydict()
        digest.update(repr([(name, chunk[name]) for name in columns]).encode("utf-8", "backslashreplace"))
    return {"rows": len(dataset), "columns": columns, "digest": digest.hexdigest()}
