"""Tiers of the cases of a parametrized test, beyond the marks that it has.

| cases | `make test` | `make test-all` | `make test-long` |
|---|---|---|---|
| that differ by the number of ranks only | one, on 2 or 3 ranks | the others | |
| of several parameters, on ranks | as many as show each value | as many as show each value again | the others |
| of several parameters, on ranks, marked `full` | | as many as show each value | the others |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ON_RANKS = ("distributed", "integrations", "kernels")  # folders


def quick(cases: Iterable[Any], *chosen: Any, others: pytest.MarkDecorator = pytest.mark.full) -> list[Any]:
    """Parameters of a test; those that are not `chosen` get the mark `others`."""
    found = [case if case in chosen else pytest.param(*_tuple(case), marks=others) for case in cases]
    assert sum(case in chosen for case in found) == len(chosen), f"not all of {chosen} are cases"
    return found


def _tuple(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def assign(items: Iterable[pytest.Item]) -> None:
    """Mark cases as `full` and `long` as the table says."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.path, item.originalname].append(item)
    for (path, _), cases in tests.items():
        _one_size(_quick(cases))
        if path.parent.name in ON_RANKS and len(cases[0].callspec.params) > 1:
            _one_of_each_value(_quick(cases), pytest.mark.full)
            full = [case for case in cases if case.get_closest_marker("full") and not case.get_closest_marker("long")]
            _one_of_each_value(full, pytest.mark.long)


def _quick(cases: Iterable[pytest.Function]) -> list[pytest.Function]:
    return [case for case in cases if not case.get_closest_marker("full") and not case.get_closest_marker("long")]


def _one_size(cases: Sequence[pytest.Function]) -> None:
    """Keep one size of 2 and 3 for each case, alternating from case to case, if the test has cases of these sizes."""
    sizes: dict[str, dict[int, pytest.Function]] = defaultdict(dict)
    for case in cases:
        params = dict(case.callspec.params)
        size = params.pop("world_size", params.pop("world", None))
        if isinstance(size, int):
            sizes[repr(params)][size] = case
    if not any({2, 3} & of.keys() for of in sizes.values()):
        return
    for number, of in enumerate(sizes.values()):
        kept = sorted({2, 3} & of.keys(), reverse=number % 2 == 0)[:1]
        for size, case in of.items():
            if size not in kept:
                case.add_marker(pytest.mark.full)


def _one_of_each_value(cases: Sequence[pytest.Function], others: pytest.MarkDecorator) -> None:
    """Keep as few cases as a greedy choice finds that show all values of all parameters; mark the others."""
    shown: set[tuple[str, str]] = set()
    left = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
    while left:
        case = max(left, key=lambda case: len(left[case] - shown))
        if left[case] <= shown:
            break
        shown |= left.pop(case)
    for case in left:
        case.add_marker(others)
