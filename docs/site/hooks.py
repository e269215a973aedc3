"""What the site has beyond the pages' own text: the table of options, links out of `docs`, and marks for the
style sheet.

MkDocs calls `on_page_markdown` and `on_page_content` for each page. In the repository a page links to
sources and results by their relative paths, which a site of the pages alone does not have: there the link's
text stays, as code.
"""

from __future__ import annotations

import re
from typing import Any

from colocate.config.help import ListedOption, option_sections

_OPTIONS = "<!-- options -->"
_NAMES = re.compile(r"(?<=<td>)(?:<code>[^<]*</code>(?:, )?)+(?=</td>)")
_CELL = re.compile(r"<td>((?:(?!</td>).)*)</td>", re.DOTALL)
_SENTENCE = 40  # characters from which a cell is a sentence
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text as the site shows it."""
    markdown = markdown.replace(_OPTIONS, option_tables())
    return _OUTSIDE.sub(lambda link: link[1] if "`" in link[1] else f"`{link[1]}`", markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The page's HTML: long names may break at / and _, sentences in tables are marked, Chinese is said to be
    Chinese."""
    html = _NAMES.sub(lambda names: re.sub(r"(?<=[\w])([/_])(?=\w)", r"\1<wbr>", names[0]), html)
    html = _CELL.sub(_marked, html)
    return f'<div lang="zh-Hant">{html}</div>' if page.file.src_uri.startswith("zh-Hant/") else html


def _marked(cell: re.Match[str]) -> str:
    text = re.sub(r"<[^>]*>", "", cell[1])
    return f'<td class="sentence">{cell[1]}</td>' if len(text) > _SENTENCE and " " in text else cell[0]


def option_tables() -> str:
    """Every option of a run under its heading: name, default, what it does."""
    parts = []
    for heading, options in option_sections().items():
        rows = "\n".join(_row(option) for option in options)
        parts.append(f"## {heading}\n\n| option | default | |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(option: ListedOption) -> str:
    text = option.text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    default = "" if option.default == "None" else f"`{option.default}`"
    return f"| `{option.name}` | {default.replace('|', chr(92) + '|')} | {text} |"
