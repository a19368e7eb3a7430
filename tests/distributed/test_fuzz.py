"""Odd inputs of every public op (tests/fuzz.py): a few of them, and 200 of each in `make test-all`."""

from __future__ import annotations

import pytest

from tests.fuzz import PROBLEMS, fuzz


@pytest.mark.parametrize("world_size", [1, 2])
def test_some_odd_inputs(world_size: int) -> None:
    assert [said for name in PROBLEMS for said in fuzz(name, 1, 40, world_size)] == []


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PROBLEMS)
def test_odd_inputs(name: str, world_size: int) -> None:
    assert fuzz(name, 0, 200, world_size) == []


@pytest.mark.long
@pytest.mark.parametrize("name", PROBLEMS)
def test_odd_inputs_over_messages(name: str) -> None:
    assert fuzz(name, 2, 80, 2, "plain") == []
