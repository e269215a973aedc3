"""What the site has beyond the pages' own text: the table of options, and links out of `docs`.

MkDocs calls `on_page_markdown` for each page. In the repository a page links to sources and results by their
relative paths, which a site of the pages alone does not have: there the link's text stays, as code.
"""

from __future__ import annotations

import re
from typing import Any

from colocate.declared_options import Option
from colocate.option_help import option_sections

_OPTIONS = "<!-- options -->"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text as the site shows it."""
    markdown = markdown.replace(_OPTIONS, option_tables())
    return _OUTSIDE.sub(lambda link: link[1] if "`" in link[1] else f"`{link[1]}`", markdown)


def option_tables() -> str:
    """Every option of a run under its heading: name, default, what it does."""
    parts = []
    for heading, options in option_sections().items():
        rows = "\n".join(_row(option) for option in options)
        parts.append(f"## {heading}\n\n| option | default | |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    text = " ".join(option.text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    default = "" if option.default == "None" else f"`{option.default}`"
    return f"| `{option.name}` | {default.replace('|', chr(92) + '|')} | {text} |"
