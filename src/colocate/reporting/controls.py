"""The controls above a page's charts: which steps are seen, and how curves are smoothed."""

from __future__ import annotations

EMA_WEIGHTS = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
"""What the mean so far weighs in an exponential moving average, which 1 / (1 - weight) steps decide."""


def controls() -> str:
    """The form, hidden until the page's script has taken it into use."""
    emas = "".join(f'<option value="{weight}">EMA {weight}</option>' for weight in EMA_WEIGHTS)
    buttons = "".join(
        f'<button type="button" data-do="{name}" aria-label="{label}" title="{label}">{sign}</button>'
        for name, sign, label in (
            ("in", "+", "Zoom in"),
            ("out", "−", "Zoom out"),
            ("earlier", "←", "Earlier steps"),
            ("later", "→", "Later steps"),
        )
    )
    return (
        '<form id="view" class="bar view" hidden aria-label="What the charts show">'
        '<div><label for="from">Steps from</label><input id="from" name="from" type="number"></div>'
        '<div><label for="to">to</label><input id="to" name="to" type="number"></div>'
        f'<div class="buttons">{buttons}<button type="button" data-do="reset">Reset</button></div>'
        '<div><label for="smoothing" class="unseen">Smoothing</label><select id="smoothing" name="smoothing">'
        '<option value="auto">auto-smoothing</option><option value="none">no smoothing</option>'
        f"{emas}</select></div>"
        '<p class="facts" id="seen" role="status"></p></form>'
    )
