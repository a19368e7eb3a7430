"""Tiers of cases: which of a parametrized test run in `make test`, `make test-all` and `make test-long`."""

from __future__ import annotations

import pytest

from tests import tiers

pytest_plugins = "pytester"

TESTS = """
import pytest
from tests.tiers import quick

@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sizes(world_size): ...

@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["tp", "cp", pytest.param("pp", marks=pytest.mark.full)])
def test_values(layout, dtype): ...

@pytest.mark.parametrize(("layout", "dtype"), quick([("tp", "bf16"), ("tp", "fp32"), ("cp", "fp32")], ("tp", "bf16")))
def test_chosen(layout, dtype): ...
"""


@pytest.mark.parametrize("folder", ["unit", "distributed", "integrations"])
def test_cases_by_tier(pytester: pytest.Pytester, folder: str) -> None:
    file = pytester.mkdir(folder) / "test_cases.py"
    file.write_text(TESTS)
    items, _ = pytester.inline_genitems(file)
    tiers.assign(items)
    found: dict[str, list[str]] = {"": [], "full": [], "long": []}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        found["long" if "long" in names else "full" if "full" in names else ""].append(item.name.removeprefix("test_"))
    values = ["tp-bf16", "tp-fp32", "cp-bf16", "cp-fp32"] if folder == "unit" else ["tp-bf16", "cp-fp32"]
    assert found[""] == ["sizes[3]", *(f"values[{one}]" for one in values), "chosen[tp-bf16]"]
    assert found["long"] == ([] if folder == "unit" else ["values[pp-fp32]"])
