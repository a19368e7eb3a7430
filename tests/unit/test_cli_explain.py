"""`fused-tp explain` on the command line."""

from __future__ import annotations

import pytest

from fused_tp.cli.main import main
from fused_tp.ops.explain import tensor_arguments


def test_help_lists_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all([op, *", ".join(names).split()] in listed for op, names in tensor_arguments().items())


def test_ring_attention(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["1x64x8x32", "1x64x2x32", "1x64x2x32"]
    assert main(["explain", "ring_attention", *shapes, "--transport", "gloo", "--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ring_attention(q [1, 64, 8, 32], k [1, 64, 2, 32], v [1, 64, 2, 32]), bfloat16 on cpu")
    assert lines[1].startswith("  forward: plain over gloo, because dispatch table")
    assert lines[3].startswith("  each step: native-cpu, because")


def test_a_collective_along_a_dim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "all_gather", "2x64", "--dim", "-1", "--ranks", "4"]) == 0
    assert capsys.readouterr().out.startswith("all_gather(x_shard [2, 64], dim=-1), bfloat16 on cpu, 4 ranks\n")


def test_question_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "all_reduce", "2x64", "--dim", "1"]) == 2
    assert "all_reduce has none" in capsys.readouterr().err
