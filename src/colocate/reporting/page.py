"""The page that reports are drawn into: its style, its scripts, and the shell around both.

A page is one file that can be mailed: nothing is loaded from elsewhere, and without scripts it still shows
all charts.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from colocate.reporting.plots import Plot
from colocate.reporting.theme import COLORS, FONT, plot_rules, stylesheet

MONOSPACE = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
EAST_ASIAN_FONTS = {  # by the language of an element's text
    "zh-Hant": "'PingFang TC','Noto Sans TC','Noto Sans CJK TC','Microsoft JhengHei'",
    "zh-Hans": "'PingFang SC','Noto Sans SC','Noto Sans CJK SC','Microsoft YaHei'",
    "ja": "'Hiragino Sans','Noto Sans JP','Noto Sans CJK JP','Yu Gothic'",
}
CHART_SCRIPTS = ("axis.js", "chart.js", "crosshair.js", "view.js")
_HERE = Path(__file__).parent
EMA_WEIGHTS = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
"""Weights of the mean so far in an exponential moving average, which 1 / (1 - weight) steps decide."""

_RULES = f"""
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--text);font:15px/1.5 {FONT}}}
main{{max-width:1176px;margin:0 auto;padding:32px 24px 48px}}
h1{{font-size:26px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:17px;margin:36px 0 12px}}
p{{margin:0}}
.facts{{color:var(--muted);font-size:14px;overflow-wrap:anywhere}}
.facts span+span::before{{content:" · "}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-top:24px}}
.tile,.card{{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px}}
.tile b{{display:block;font-size:21px;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}}
.tile span,.tile small{{color:var(--muted);font-size:13px;display:block}}
.grid3{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:12px}}
.grid2{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px}}
.gap{{margin-top:12px}}
.two{{grid-column:span 2}}
.narrow{{display:none}}
.share{{display:flex;height:26px;border-radius:6px;overflow:hidden;gap:1px}}
.share i{{display:block}}
.scroll{{overflow-x:auto}}
.scroll table{{margin-top:0}}
.runs th,.runs td{{white-space:nowrap}}
#group{{width:90px}}
#found{{margin-top:12px}}
table{{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;margin-top:12px}}
th,td{{text-align:right;padding:5px 0 5px 12px;border-top:1px solid var(--line)}}
th{{color:var(--muted);font-weight:500;border-top:0}}
th:first-child,td:first-child{{text-align:left;padding-left:0}}
td.part{{padding-left:22px!important;color:var(--muted)}}
.key i{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:8px}}
h3{{font-size:14px;margin:0 0 10px;color:var(--muted);font-weight:600}}
.sample+.sample{{border-top:1px solid var(--line);margin-top:14px;padding-top:14px}}
.sample pre{{font:13px/1.5 {MONOSPACE};
 white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0 0;max-height:240px;overflow:auto}}
.sample pre.prompt{{color:var(--muted);max-height:110px;border-left:2px solid var(--line);padding-left:10px}}
.chip{{display:inline-block;background:var(--page);border:1px solid var(--line);border-radius:20px;
 padding:0 9px;margin:0 6px 4px 0;font-size:12.5px;font-variant-numeric:tabular-nums}}
.origin pre{{font:13px/1.5 {MONOSPACE};
 white-space:pre-wrap;overflow-wrap:anywhere;margin:0 0 8px}}
.options td{{text-align:left;overflow-wrap:anywhere;vertical-align:top}}.options td+td{{color:var(--muted)}}
footer{{color:var(--muted);font-size:13px;margin-top:32px}}
details summary{{cursor:pointer;color:var(--muted);margin-top:14px}}
details[open] summary{{margin-bottom:12px}}
.tip{{position:absolute;z-index:1;pointer-events:none;background:var(--text);color:var(--card);border-radius:6px;
 padding:5px 9px;font-size:12.5px;max-width:320px;font-variant-numeric:tabular-nums}}
.tip b{{font-weight:600}}
.tip i{{display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:3px}}
svg.plot[tabindex]{{cursor:crosshair;touch-action:pan-y pinch-zoom;user-select:none}}
svg.plot .chosen{{fill:var(--blue);opacity:.18;pointer-events:none}}
svg.plot .cross{{stroke:var(--muted);stroke-width:1;pointer-events:none}}
svg.plot:focus-visible{{outline:2px solid var(--blue);outline-offset:4px;border-radius:4px}}
.bar{{display:flex;flex-wrap:wrap;gap:10px 16px;align-items:end;margin-bottom:12px}}
.bar label{{font-size:13px;color:var(--muted);display:block}}
.bar input,.bar select,.bar button{{font:inherit;font-size:14px;color:var(--text);background:var(--page);
 border:1px solid var(--muted);border-radius:6px;padding:4px 8px;max-width:100%}}
.bar [aria-disabled=true]{{color:var(--muted);border-color:var(--line);cursor:default}}
.view{{position:sticky;top:0;z-index:1;background:var(--page);border-bottom:1px solid var(--line);
 padding:8px 0;margin:20px 0 0;gap:8px 16px;align-items:center}}
.view[hidden]{{display:none}}
.view>div{{display:flex;gap:6px;align-items:center}}
.view input{{width:84px}}
.view+h2{{margin-top:20px}}
.unseen{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}}
html{{scroll-padding-top:64px}}
@media (max-width:720px){{main{{padding:20px 12px 32px}}.wide{{display:none}}
 .two{{grid-column:auto}}.narrow{{display:block}}
 .runs tr:first-child{{display:none}}.runs tr{{display:grid;grid-template-columns:repeat(3,1fr);
 gap:6px 12px;padding:10px 0}}.runs td{{border-top:0;padding:0;text-align:left;white-space:normal}}
 .runs .key{{grid-column:1/-1;overflow-wrap:anywhere}}
 .runs td[data-name]::before{{content:attr(data-name);display:block;color:var(--muted);font-size:12px}}
 .runs tr+tr+tr{{border-top:1px solid var(--line)}}
 .tile:last-child:nth-child(odd){{grid-column:span 2}}.view input{{width:64px}}.view{{gap:8px 10px}}
 .view .facts{{font-size:12.5px;flex-basis:100%}}html{{scroll-padding-top:124px}}
 .tiles{{grid-template-columns:repeat(2,1fr)}}.tile{{padding:12px}}.tile b{{font-size:19px}}}}
"""


def _fonts_by_language() -> str:
    """The rules that give each text of Chinese or Japanese the forms of its own characters."""
    return "".join(
        f":lang({language}){{font-family:{FONT},{fonts}}}.sample pre:lang({language})"
        f"{{font-family:{MONOSPACE},{fonts}}}"
        for language, fonts in EAST_ASIAN_FONTS.items()
    )


def page(title: str, body: str, *, scripts: Iterable[str] = CHART_SCRIPTS, language: str = "en") -> str:
    """The HTML of a whole page.

    Args:
        scripts: files of this directory whose text goes into the page.
        language: of the text, for its fonts and for screen readers.
    """
    colors = "".join(f".b-{name}{{background:var(--{name})}}" for name in COLORS)
    inline = "".join(f"<script>{(_HERE / name).read_text(encoding='utf-8')}</script>" for name in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="{language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{stylesheet(_RULES + plot_rules() + colors + _fonts_by_language())}</style></head>"
        f"<body><main>{body}</main>{inline}</body></html>\n"
    )


def card(content: str | Plot, css_class: str = "") -> str:
    """A box with a border, around text or a chart."""
    if isinstance(content, Plot):
        content = content.svg() + content.data()
    return f'<div class="{f"card {css_class}".strip()}">{content}</div>'


def wide_card(wide: Plot | None, narrow: Plot | None, css_class: str = "") -> str:
    """A card with two drawings of one chart: on a phone, the text of the drawing for a screen would be
    tiny. Empty if there is no drawing."""
    if wide is None or narrow is None:
        return ""
    drawings = f'<div class="wide">{wide.svg()}</div><div class="narrow">{narrow.svg()}</div>'
    return card(drawings + wide.data(), css_class)


def controls() -> str:
    """The form that says which steps charts show, and how smooth; hidden until the page's script uses it."""
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
