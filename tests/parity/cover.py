"""All-pairs cover: few combinations in which any two values of two axes meet."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Value = str | int | float | bool
Row = dict[str, Value]
Axes = Mapping[str, Sequence[Value]]
Allowed = Callable[[Mapping[str, Value]], bool]
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def feasible_pairs(axes: Axes, allowed: Allowed) -> list[Pair]:
    """Return the pairs of values that may stand in one combination, in the order of the axes."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[a], axes[b])
        if allowed({a: x, b: y})
    ]


def pairs_of(row: Mapping[str, Value], axes: Axes) -> set[Pair]:
    """Return the pairs that ``row`` covers."""
    return set(itertools.combinations(((name, row[name]) for name in axes), 2))


def all_pairs(axes: Axes, allowed: Allowed) -> list[Row]:
    """Return rows that cover every feasible pair: greedy, and the same on every run.

    ``allowed`` judges a partial row; whatever it accepts must be completable, axis by axis.
    """
    uncovered = dict.fromkeys(feasible_pairs(axes, allowed))
    used: Counter[tuple[str, Value]] = Counter()
    rows = []
    while uncovered:
        row: Row = dict(next(iter(uncovered)))
        for name in axes:
            if name not in row:
                row[name] = _best_value(name, axes, row, uncovered, used, allowed)
        for pair in pairs_of(row, axes):
            uncovered.pop(pair, None)
        used.update(row.items())
        rows.append({name: row[name] for name in axes})
    return rows


def _best_value(  # the loop above, one level down
    name: str,
    axes: Axes,
    row: Row,
    uncovered: Mapping[Pair, None],
    used: Mapping[tuple[str, Value], int],
    allowed: Allowed,
) -> Value:
    """Return the value that covers most of what is uncovered; of equals the one least used."""
    order = {axis: index for index, axis in enumerate(axes)}

    def gain(value: Value) -> int:
        mine = (name, value)
        return sum(
            ((other, mine) if order[other[0]] < order[name] else (mine, other)) in uncovered
            for other in row.items()
        )

    candidates = [v for v in axes[name] if allowed({**row, name: v})]
    return max(candidates, key=lambda v: (gain(v), -used.get((name, v), 0)))
