"""Colours and type of the report and its pictures, for light and dark screens."""

from __future__ import annotations

# name: (on light, on dark). They stay apart for colour-blind readers and in greyscale print, and each has a
# contrast of at least 3:1 with the card behind it.
COLORS = {
    "blue": ("#2f6cb0", "#74aef0"),
    "orange": ("#d4763a", "#eda06a"),
    "green": ("#3f8f72", "#6fc4a4"),
    "gold": ("#a67f1e", "#e0c05f"),
    "purple": ("#7b62a8", "#b5a0e0"),
    "red": ("#b8505f", "#e58a97"),
    "slate": ("#4d5b70", "#94a3b8"),
    "brown": ("#8b5e3c", "#c2a083"),
    "gray": ("#878f9e", "#6f7887"),
}

PHASE_COLORS = {
    "rollout": "blue",
    "score": "gold",
    "train": "orange",
    "publish": "green",
    "evaluate": "purple",
    "save": "red",
    "other": "gray",
}

# Memory keeps the colour of the phase that it serves.
CATEGORY_COLORS = {
    "libraries": "brown",
    "weights": "slate",
    "optimizer": "purple",
    "kv_cache": "blue",
    "rollout_weights": "green",
    "gradients": "gold",
    "activations": "orange",
    "logits": "red",
    "workspace": "gray",
    "other": "gray",
    "in use": "orange",
}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"

_INK = {  # name: (on light, on dark)
    "text": ("#1c2430", "#e6e9ef"),
    "muted": ("#667085", "#98a2b3"),
    "line": ("#e3e7ed", "#2c333e"),
    "card": ("#ffffff", "#181d25"),
    "page": ("#f6f7f9", "#0f1318"),
}


def color_of(name: str, known: dict[str, str], others: list[str]) -> str:
    """The colour of a phase or category; `others` lists the names that have no colour of their own, in a
    fixed order."""
    if name in known:
        return known[name]
    spare = ["red", "green", "purple", "gold", "slate"]
    return spare[others.index(name) % len(spare)]


def category_label(name: str) -> str:
    """A category of memory as readers see it."""
    return {"kv_cache": "KV cache", "libraries": "Python and libraries"}.get(name, name.replace("_", " "))


def stylesheet(rules: str) -> str:
    """The CSS `rules` twice, for light and for dark screens, with each `var(--name)` replaced by its colour.

    The colours are written out because some programs that show pictures do not know CSS's custom properties.
    """

    def written_out(scheme: int) -> str:
        css = rules
        for name, pair in {**_INK, **COLORS}.items():
            css = css.replace(f"var(--{name})", pair[scheme])
        return css

    dark = f"@media (prefers-color-scheme:dark){{{written_out(1)}}}"
    return f":root{{color-scheme:light dark}}{written_out(0)}{dark}"


def plot_rules() -> str:
    """The CSS rules, to be passed to `stylesheet`, of everything that `plots` draws."""
    rules = [
        f"svg.plot{{display:block;width:100%;height:auto;font-family:{FONT};font-size:11px}}",
        "svg.plot text{fill:var(--muted)}",
        "svg.plot .title{fill:var(--text);font-size:13px;font-weight:600}",
        "svg.plot .key{fill:var(--text)}",
        "svg.plot .heading{fill:var(--text);font-weight:600}",
        ".grid{stroke:var(--line);stroke-width:1;fill:none}",
        ".rule{stroke:var(--muted);stroke-width:1;stroke-dasharray:4 3;fill:none}",
        ".curve{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}",
        ".faint{fill:none;stroke-width:.9;opacity:.72;stroke-linejoin:round}",
        ".band{opacity:.16;stroke:none}",
        ".dot{stroke:var(--card);stroke-width:1.2}",
        ".hit{fill:transparent}",
        ".hit:hover{fill:var(--muted);opacity:.18}",
    ]
    rules += [f".s-{name}{{stroke:var(--{name})}}.f-{name}{{fill:var(--{name})}}" for name in COLORS]
    return "".join(rules)
