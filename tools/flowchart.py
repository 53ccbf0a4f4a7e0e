"""Draw the flowcharts of Markdown as SVG, without a browser: boxes in rows, arrows that lead down.

It reads a part of mermaid's language: ``flowchart``, ``subgraph name [Title]``, boxes ``a[text]``,
``a["text<br/>text"]`` and ``a[(text)]``, arrows ``a --> b``, ``a <--> b``, ``a -- "text" --> b``.

[Note: Rows] Boxes are in even rows and labels of arrows in odd ones, so that none lies on another.
An arrow is a chain of items, one in each row that it crosses. An arrow that closes a circle is laid
out as if it were reversed. Each row is ordered by the mean place of its items' neighbours; then
items are pulled there as far as the order and their widths allow.
"""

import re
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import mean

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A flowchart in a page."""
_BOX = re.compile(r'(\w+)(?:\[(\()?"?([^"\]]+?)"?\)?\])?')
_ARROW = re.compile(r'\s+(?:(<?--)>|-- "([^"]+)" -->|(<)-- "([^"]+)" -->)\s+')
_LETTER, _LINE, _GAP, _PAD = 7.3, 17, 26, 9
_SWEEPS = 24


@dataclass
class _Item:
    """A box, the label of an arrow, or the place where an arrow crosses a row."""

    lines: list[str]
    box: bool = False
    store: bool = False
    group: str = ""
    row: int = 0
    x: float = 0.0
    above: list["_Item"] = field(default_factory=list)
    below: list["_Item"] = field(default_factory=list)

    @property
    def width(self) -> float:
        longest = max((len(line) for line in self.lines), default=0)
        return longest * _LETTER + 2 * _PAD if longest else 4.0

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + (2 * _PAD if self.box else 0)


@dataclass
class _Arrow:
    chain: list[_Item]
    """From the upper box to the lower one."""
    heads: tuple[bool, bool]
    """Whether it points to the upper one, and to the lower one."""


def drawn(text: str) -> str:
    """Return a page with its flowcharts as pictures."""
    return FENCE.sub(lambda match: svg(match[1]), text)


def svg(source: str) -> str:
    """Return a flowchart as an element of HTML, in the colours of the page that it is on."""
    boxes, links = _parse(source)
    rows, arrows = _rows(boxes, links)
    _place(rows)
    y, tops = 8.0, []
    for row in rows:
        height = max((item.height for item in row), default=0.0)
        tops.append((y, height))
        y += height + (22 if row and any(item.box for item in row) else 12)
    left = min(item.x - item.width / 2 for row in rows for item in row) - 10
    right = max(item.x + item.width / 2 for row in rows for item in row) + 10
    middles = {id(item): tops[item.row][0] + tops[item.row][1] / 2 for row in rows for item in row}
    parts = [_path(arrow, middles) for arrow in arrows]
    parts += [_drawn_item(item, middles[id(item)]) for row in rows for item in row if item.lines]
    size = f'viewBox="{left:.0f} 0 {right - left:.0f} {y:.0f}" width="{right - left:.0f}"'
    marker = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker>'
    )
    inside = "".join(part for part in parts if part)
    groups = dict.fromkeys(box.group for box in boxes.values() if box.group)
    legend = "".join(
        f'<span data-group="{escape(group)}">{escape(group)}</span>' for group in groups
    )
    picture = f'<svg {size} role="img"><defs>{marker}</defs>{inside}</svg>'
    return f'<div class="flowchart">{picture}<p>{legend}</p></div>'


def _parse(source: str) -> tuple[dict[str, _Item], list[tuple[str, str, str, bool]]]:
    boxes: dict[str, _Item] = {}
    links: list[tuple[str, str, str, bool]] = []
    group = ""
    for line in map(str.strip, source.splitlines()):
        if found := re.fullmatch(r"subgraph \w+ \[(.+)\]", line):
            group = found[1]
        elif line == "end":
            group = ""
        elif line and not line.startswith("flowchart"):
            pieces = _ARROW.split(line)
            names = []
            for piece in pieces[::5]:
                box = _BOX.fullmatch(piece)
                if box is None:
                    message = f"a flowchart has {line!r}, which tools/flowchart.py does not read"
                    raise ValueError(message)
                names.append(box[1])
                if box[1] not in boxes or box[3]:
                    lines = (box[3] or box[1]).split("<br/>")
                    boxes[box[1]] = _Item(lines, box=True, store=bool(box[2]), group=group)
            for place, (one, two) in enumerate(pairwise(names)):
                plain, says, both, says_both = pieces[5 * place + 1 : 5 * place + 5]
                links.append((one, two, says or says_both or "", bool(both) or plain == "<--"))
    return boxes, links


def _rows(
    boxes: dict[str, _Item], links: list[tuple[str, str, str, bool]]
) -> tuple[list[list[_Item]], list[_Arrow]]:
    """Give each item a row."""
    turned = _closing(list(boxes), [(one, two) for one, two, *_ in links])
    forward = [(two, one) if (one, two) in turned else (one, two) for one, two, *_ in links]
    for _ in boxes:
        for one, two in forward:
            boxes[two].row = max(boxes[two].row, boxes[one].row + 2)
    for name, box in boxes.items():  # a source stands just above what it leads to
        lower = [boxes[two].row for one, two in forward if one == name]
        if lower and not any(two == name for _, two in forward):
            box.row = min(lower) - 2
    rows: list[list[_Item]] = [[] for _ in range(max(box.row for box in boxes.values()) + 1)]
    arrows = []
    for box in boxes.values():
        rows[box.row].append(box)
    for (one, two), (first, second, says, both) in zip(forward, links, strict=True):
        upper, lower = boxes[one], boxes[two]
        between = [_Item([], row=row) for row in range(upper.row + 1, lower.row)]
        if says:
            between[len(between) // 4 * 2].lines = says.split("<br/>")
        chain = [upper, *between, lower]
        for here, there in pairwise(chain):
            here.below.append(there)
            there.above.append(here)
        for item in between:
            rows[item.row].append(item)
        arrows.append(
            _Arrow(
                chain, (both or (first, second) in turned, both or (first, second) not in turned)
            )
        )
    return rows, arrows


def _closing(names: list[str], links: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that close circles, as a walk from the first box meets them."""
    closing: set[tuple[str, str]] = set()
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        for one, two in links:
            if one == name and two in (*path, name):
                closing.add((one, two))
            elif one == name and two not in done:
                walk(two, (*path, name))
        done.add(name)

    for name in names:
        if name not in done:
            walk(name, ())
    return closing


def _place(rows: list[list[_Item]]) -> None:
    """Order the items of each row, and give them places; see [Note: Rows]."""
    for row in rows:
        for place, item in enumerate(row):
            item.x = 120.0 * (place - (len(row) - 1) / 2)
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for row in rows if downward else reversed(rows):
            wanted = [_wanted(item, downward=downward) for item in row]
            order = sorted(range(len(row)), key=wanted.__getitem__)
            if sweep < _SWEEPS // 2:
                row[:] = [row[place] for place in order]
                wanted = [wanted[place] for place in order]
            _spread(row, wanted)


def _wanted(item: _Item, *, downward: bool) -> float:
    near = (item.above if downward else item.below) or item.above or item.below
    return mean(other.x for other in near) if near else item.x


def _spread(row: list[_Item], wanted: list[float]) -> None:
    """Put items where they are wanted, in order and without overlap, by least squares."""
    offsets = [0.0]
    for one, two in pairwise(row):
        offsets.append(offsets[-1] + (one.width + two.width) / 2 + _GAP)
    blocks: list[list[float]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        blocks.append([want - offset])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    starts = [mean(block) for block in blocks for _ in block]
    for item, start, offset in zip(row, starts, offsets, strict=True):
        item.x = start + offset


def _path(arrow: _Arrow, middles: dict[int, float]) -> str:
    upper, lower = arrow.chain[0], arrow.chain[-1]
    points = [(upper.x, middles[id(upper)] + upper.height / 2)]
    points += [(item.x, middles[id(item)]) for item in arrow.chain[1:-1]]
    points.append((lower.x, middles[id(lower)] - lower.height / 2))
    curve = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x1, y1), (x2, y2) in pairwise(points):
        half = (y1 + y2) / 2
        curve += f" C{x1:.0f} {half:.0f} {x2:.0f} {half:.0f} {x2:.0f} {y2:.0f}"
    heads = ("marker-start", "marker-end")
    marks = "".join(
        f' {name}="url(#head)"' for name, has in zip(heads, arrow.heads, strict=True) if has
    )
    return f'<path class="arrow" d="{curve}"{marks}/>'


def _drawn_item(item: _Item, middle: float) -> str:
    """Return the SVG of a box or of a label."""
    kind = ("store" if item.store else "box") if item.box else "says"
    left, top = item.x - item.width / 2, middle - item.height / 2
    first = middle - (len(item.lines) - 1) * _LINE / 2
    text = "".join(
        f'<text x="{item.x:.0f}" y="{first + place * _LINE:.0f}">{escape(line)}</text>'
        for place, line in enumerate(item.lines)
    )
    frame = (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{item.width:.0f}" height="{item.height:.0f}"'
        f' rx="{14 if item.store else 4}"/>'
    )
    return f'<g class="{kind}" data-group="{escape(item.group)}">{frame}{text}</g>'
