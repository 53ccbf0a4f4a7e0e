"""Covering arrays: few combinations in which any two, or any three, values of axes meet."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

Value = str | int | float | bool
Row = dict[str, Value]
Axes = Mapping[str, Sequence[Value]]
Allowed = Callable[[Mapping[str, Value]], bool]
Item = tuple[str, Value]
Combination = tuple[Item, ...]
"""Values of some axes, in the order of the axes."""


def feasible(axes: Axes, allowed: Allowed, names: Sequence[str]) -> list[Combination]:
    """Return the combinations of values of ``names`` that may stand in one row."""
    ordered = [name for name in axes if name in names]
    combinations = (
        tuple(zip(ordered, values, strict=True))
        for values in itertools.product(*(axes[name] for name in ordered))
    )
    return [each for each in combinations if allowed(dict(each))]


def feasible_pairs(axes: Axes, allowed: Allowed) -> list[Combination]:
    """Return the pairs of values that may stand in one row, in the order of the axes."""
    pairs = itertools.combinations(axes, 2)
    return [each for names in pairs for each in feasible(axes, allowed, names)]


def feasible_triples(
    axes: Axes, allowed: Allowed, groups: Iterable[Sequence[str]]
) -> list[Combination]:
    """Return the triples of values, of axes that a group names together, of one row."""
    triples = dict.fromkeys(
        tuple(name for name in axes if name in names)
        for group in groups
        for names in itertools.combinations(group, min(3, len(group)))
    )
    return [each for names in triples for each in feasible(axes, allowed, names)]


def all_pairs(axes: Axes, allowed: Allowed) -> list[Row]:
    """Return rows that cover every feasible pair."""
    return covering(axes, allowed, feasible_pairs(axes, allowed))


def crossed(
    allowed: Allowed = lambda _: True, *, meet: int = 2, **axes: Sequence[object]
) -> pytest.MarkDecorator:
    """Parametrize by the product of ``axes``: some rows, and the others for the soak.

    In some any two values ``meet``, or any three. ``allowed`` judges a row by their numbers.
    """
    numbers = {name: range(len(values)) for name, values in axes.items()}
    triples = feasible_triples(numbers, allowed, [tuple(axes)])
    covered = triples if meet == 3 else feasible_pairs(numbers, allowed)
    chosen = {tuple(row.values()) for row in covering(numbers, allowed, covered)}
    rows = []
    for row in feasible(numbers, allowed, tuple(axes)):
        values = (axes[name][number] for name, number in row)
        marks = () if tuple(number for _, number in row) in chosen else pytest.mark.soak
        rows.append(pytest.param(*values, marks=marks))
    return pytest.mark.parametrize(tuple(axes), rows)


def covering(axes: Axes, allowed: Allowed, combinations: Iterable[Combination]) -> list[Row]:
    """Return rows that cover all ``combinations``: greedy, and the same on every run.

    ``allowed`` judges a partial row; whatever it accepts must be completable, axis by axis.
    """
    uncovered = dict.fromkeys(combinations)
    having: dict[Item, dict[Combination, None]] = defaultdict(dict)
    for combination in uncovered:
        for item in combination:
            having[item][combination] = None
    used: Counter[Item] = Counter()
    rows = []
    while uncovered:
        row: Row = dict(next(iter(uncovered)))
        for name in axes:
            if name not in row:
                row[name] = _best_value(name, axes[name], row, having, used, allowed)
        items = row.items()
        for combination in [each for each in uncovered if items >= set(each)]:
            del uncovered[combination]
            for item in combination:
                del having[item][combination]
        used.update(items)
        rows.append({name: row[name] for name in axes})
    return rows


def _best_value(  # the loop above, one level down
    name: str,
    values: Sequence[Value],
    row: Mapping[str, Value],
    having: Mapping[Item, Mapping[Combination, None]],
    used: Mapping[Item, int],
    allowed: Allowed,
) -> Value:
    """Return the value that covers most of what is uncovered; of equals the one least used."""
    items = set(row.items())

    def gain(value: Value) -> int:
        item = (name, value)
        return sum(items.issuperset(set(each) - {item}) for each in having[item])

    candidates = [v for v in values if allowed({**row, name: v})]
    return max(candidates, key=lambda v: (gain(v), -used.get((name, v), 0)))
