"""Draw bars of prompt time relative to the uncompiled model, as an SVG that suits a light and a dark page."""

import math
from xml.sax.saxutils import escape

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 210, 60, 92, 34
BAR, GAP = 15, 15
# The bars of a group from top to bottom: label -> CSS class in STYLE.
SERIES = {"KJNodes": "kjnodes", "Torch Compile Kit": "ours"}
# Bars of a larger ratio are cut, with the number after the bar: a bar of 2.5 would make all others short.
LIMIT = 1.8
DIED = "no image, ends with an error"
STYLE = """
  svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px }
  .page { fill: #ffffff; stroke: #d8dee6 } .ink { fill: #16202e } .muted { fill: #5c6878 } .grid { stroke: #e3e7ed }
  .eager { stroke: #16202e; stroke-width: 1.5; stroke-dasharray: 5 4 }
  .kjnodes { fill: #d9962b } .ours { fill: #2563eb }
  .value { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
  .cut { stroke: #ffffff; stroke-width: 2.5 }
  .title { font-size: 18px; font-weight: 600 } .strong { font-weight: 600 } .end { text-anchor: end }
  .middle { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d } .ink { fill: #e6edf3 } .muted { fill: #9aa5b4 } .grid { stroke: #262d36 }
    .eager { stroke: #e6edf3 } .cut { stroke: #0d1117 } .value { stroke: #0d1117 } .ours { fill: #4f8df9 }
  }
"""


def draw(groups: list[tuple[str, str, list[float | None]]]) -> str:
    """The chart as the text of an SVG.

    Args:
        groups: (name, detail, ratios) of each model, with a ratio for each of SERIES: None if not measured, infinite if the
            prompt ended with an error.
    """
    highest = min(max([1.0, *(ratio for *_, ratios in groups for ratio in ratios if ratio and ratio < math.inf)]), LIMIT) * 1.06

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(ratio / highest, 1)

    body, y = [], TOP
    for name, detail, ratios in groups:
        known = [(*of, ratio) for of, ratio in zip(SERIES.items(), ratios, strict=True) if ratio is not None]
        height = max(len(known), 2) * BAR  # a name and its detail need the height of two bars
        body += [
            _text(LEFT - 14, y + height / 2 - 3, name, "ink strong end"),
            _text(LEFT - 14, y + height / 2 + 13, detail, "muted end"),
        ]
        top = y + (height - len(known) * BAR) / 2
        for index, (series, kind, ratio) in enumerate(known):
            bar = top + index * BAR
            if ratio == math.inf:
                body.append(_text(LEFT + 6, bar + BAR - 3, f"{series}: {DIED}", "value muted"))
                continue
            body.append(_rect(LEFT, bar + 1, x(ratio) - LEFT, BAR - 2, kind))
            if ratio > highest:
                body += [_line(x(ratio) - at, bar + BAR + 1, x(ratio) - at + 8, bar - 1, "cut") for at in (24, 19)]
            body.append(
                _text(x(ratio) + 6, bar + BAR - 3, f"{ratio:.2f}", "value ink strong" if kind == "ours" else "value muted")
            )
        y += height + GAP
    bottom = y - GAP + 8
    ticks = [0.2 * index for index in range(int(highest / 0.2 + 1e-9) + 1)]
    grid = [_line(x(tick), TOP - 8, x(tick), bottom, "grid") for tick in ticks]
    labels = [_text(x(tick), bottom + 18, f"{tick:.1f}", "muted middle") for tick in ticks]
    eager = [_line(x(1), TOP - 8, x(1), bottom, "eager"), _text(x(1), TOP - 14, "uncompiled", "ink middle")]
    height = bottom + BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}">',
            f"<title>Time of an image relative to the uncompiled model</title>\n<style>{STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>',
            _text(24, 34, "Time of an image, uncompiled = 1: shorter is faster", "ink title"),
            *_legend(),
            *grid,
            *eager,
            *body,
            *labels,
            "</svg>\n",
        ]
    )


def _legend() -> list[str]:
    parts, left = [], 24
    for series, kind in SERIES.items():
        parts += [_rect(left, 49, 12, 12, kind), _text(left + 18, 60, series, "ink")]
        left += 44 + 7.5 * len(series)
    return parts


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
