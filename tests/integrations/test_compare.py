"""`fused-tp compare` from its command line: ranks and results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from fused_tp.cli.main import main

# A model with sizes that are not powers of two; fp32 losses of a few steps differ by rounding only.
TINY = [
    *("--set", "model.config={hidden_size: 48, intermediate_size: 84, num_hidden_layers: 2, num_attention_heads: 4}"),
    *("--set", "data.seq=36", "--set", "global_batch=4"),
]


@pytest.mark.full
def test_ways_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--set", "sample.tokens=20", "--set", "profile={first: 1, steps: 9}"]  # compared runs are not profiled
    assert main(["compare", *TINY, *own, "--steps", "4", "--tp", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "All train alike" in printed and "Sample of the last configuration: " in printed and "The " in printed
    written = json.loads((tmp_path / "compare.json").read_text())
    by_name = {one["name"]: one for one in written["results"]}
    assert {"one process", "tp2", "tp2, plain collectives"} <= set(by_name)
    for one in by_name.values():
        assert len(one["losses"]) == len(one["seconds"]) == 4
        assert one["losses"] == pytest.approx(by_name["one process"]["losses"], abs=1e-5)


@pytest.mark.full
def test_what_fails_in_a_rank_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    out = ["--out", str(tmp_path), "--steps", "3"]
    assert main(["compare", *TINY, *out, "--set", f"data.path={tmp_path / 'short.txt'}"]) == 2
    assert "fused-tp compare: The text must have at least seq=36 tokens, got 10" in capsys.readouterr().err
    assert main(["compare", *TINY, *out, "--set", "optimizer.learning_rate=1e30"]) == 1
    assert "gradients of step" in capsys.readouterr().err
