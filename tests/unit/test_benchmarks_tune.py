"""Tuning: noise changes nothing, a clear win does, and the table that is written chooses what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.tune import challenge, retuned
from fused_tp.runtime import dispatch


def test_noise_does_not_unseat_the_incumbent() -> None:
    seconds = {"plain": [1.0, 1.0, 1.0, 1.0], "pipelined": [0.9, 0.97, 1.1, 0.5]}
    assert challenge("plain", seconds) == "plain"


def test_a_clear_win_does() -> None:
    seconds = {"plain": [1.0, 1.1, 1.0], "pipelined": [0.8, 0.8, 0.9], "one_sided": [0.7, 0.6, 0.7]}
    assert challenge("plain", seconds) == "one_sided"


def test_an_incumbent_that_did_not_run_yields_to_the_fastest() -> None:
    assert challenge("one_sided", {"plain": [1.0, 1.0, 1.0], "pipelined": [0.99, 0.99, 5.0]}) == "pipelined"


def test_the_written_table_chooses_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winners = [(1 << 14, "plain"), (1 << 18, "one_sided"), (1 << 22, "one_sided")]
    table = retuned(dispatch.load_table(), "shm", "matmul_all_reduce", torch.float32, 2, winners)
    path = tmp_path / "dispatch.json"
    path.write_text(json.dumps({"arch": table}))
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))

    def chosen(op: str, dtype: torch.dtype, rows: int, world_size: int = 2, transport: str = "shm") -> str:
        k, n = (1024, None) if op == "all_gather_matmul" else (None, 1024)
        return dispatch.choose(op, dtype, rows, k, n, world_size, transport, "cpu").schedule

    assert chosen("matmul_all_reduce", torch.float32, 4) == "plain"  # 16 KiB
    assert chosen("matmul_all_reduce", torch.float32, 15) == "plain"  # below the geometric mean of 16 and 256 KiB
    assert chosen("matmul_all_reduce", torch.float32, 17) == "one_sided"
    assert chosen("matmul_all_reduce", torch.float32, 1 << 20) == "one_sided"
    monkeypatch.delenv("FUSED_TP_TABLE")
    before = chosen("matmul_all_reduce", torch.bfloat16, 4), chosen("matmul_all_reduce", torch.float32, 4, 4)
    gloo = chosen("matmul_all_reduce", torch.float32, 4, transport="gloo")
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))
    assert (chosen("matmul_all_reduce", torch.bfloat16, 4), chosen("matmul_all_reduce", torch.float32, 4, 4)) == before
    assert chosen("matmul_all_reduce", torch.float32, 4, transport="gloo") == gloo


def test_tuning_again_replaces_its_own_rules_only() -> None:
    first = retuned(
        dispatch.load_table(), "gloo", "all_gather_matmul", torch.float32, 2, [(1, "plain"), (2, "pipelined")]
    )
    second = retuned(first, "gloo", "all_gather_matmul", torch.float32, 2, [(1, "plain"), (2, "pipelined")])
    assert second == first
    other = retuned(first, "gloo", "all_gather_matmul", torch.bfloat16, 2, [(1, "plain")])
    rules = other["cpu"]["gloo"]["all_gather_matmul"]
    assert [rule.get("dtypes") for rule in rules[:3]] == [["bfloat16"], ["float32"], ["float32"]]
    assert dispatch.load_table()["cpu"].get("gloo") is None  # what is shipped is not touched
