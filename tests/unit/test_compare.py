"""`fused-tp compare` without its ranks: arguments, ways, the table, the picture."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from fused_tp.cli.compare import SMALL_LLAMA, add_arguments, make_jobs, parse_configs
from fused_tp.cli.compare_report import Comparison
from fused_tp.cli.compare_result import VariantResult
from fused_tp.cli.main import main


def ways(line: str) -> dict[str, dict[str, int]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parse_configs(parser.parse_args(line.split()))


def test_ways_become_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    asked = ways('--tp 2 --pp 2 --fsdp 4 --parallel {"tp":2,"cp":2}')
    assert asked["pp2"] == {"pp": 2, "microbatches": 4} and asked["tp2 x cp2"] == {"tp": 2, "cp": 2}
    found = [
        (job.ranks, [(v.name, v.uses_plain_collectives, v.threads) for v in job.settings])
        for job in make_jobs(SMALL_LLAMA, asked, "cpu")
    ]
    assert found == [
        (1, [("one process", False, 1), ("one process, 3 threads", False, 3)]),
        (2, [("tp2", False, 1), ("tp2, plain collectives", True, 1)]),
        (2, [("pp2", False, 1)]),
        (4, [("fsdp4", False, 1)]),
        (4, [("tp2 x cp2", False, 1), ("tp2 x cp2, plain collectives", True, 1)]),
    ]
    assert len(make_jobs(SMALL_LLAMA, asked, "cuda")[0].settings) == 1


BAD_ARGUMENTS = {
    "--tp 1": "--tp: must be at least 2, got 1",
    "--steps 2": "--steps: must be at least 3, got 2",
    "--parallel tp=2": "--parallel tp=2 is not valid JSON",
    "--parallel [2]": 'must be a JSON mapping such as {"tp": 2}',
    '--parallel {"tq":2}': "tq",
    "--set stepz=3": "'stepz' is not a key of a training configuration",
    "--set model.config.num_hidden_layers": "has no '='",
    "--config no/such.yaml": "no/such.yaml",
    f"--out {__file__}/new": "test_compare.py/new cannot be created or written to (Not a directory); use another",
}


@pytest.mark.parametrize("line", BAD_ARGUMENTS)
def test_bad_arguments_get_a_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["compare", *line.split()])
    except SystemExit as end:  # argparse's own
        code = end.code
    assert code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("fused-tp compare: ") and BAD_ARGUMENTS[line] in message


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare", "--tp", "2"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err


def results(off: float) -> list[list[VariantResult]]:
    losses = [5.0 - 0.1 * step for step in range(12)]
    near = [loss + off for loss in losses]
    first = [9.0, 9.0]  # steps that are not timed
    alone = VariantResult("one process", 1, 1, 1024, first + [0.9] * 10, [0.0] * 12, losses, 2**30)
    fused = VariantResult("tp2", 2, 1, 1024, first + [0.5] * 10, [0.02] * 12, near, 2**29)
    plain = VariantResult("tp2, plain collectives", 2, 1, 1024, first + [0.6] * 10, [0.12] * 12, near, None)
    return [[alone], [fused, plain]]


def test_table_json_and_picture(tmp_path: Path) -> None:
    found = Comparison(results(1e-6), "fp32")
    found.write(tmp_path, SMALL_LLAMA)
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["alike"] and written["speedup_over_plain"] == {"tp2": pytest.approx(1.2)}
    assert [one["step_seconds"] for one in written["results"]] == [0.9, 0.5, 0.6]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    table = str(found)
    assert "tp2 is 1.20x as fast as with plain collectives." in table and "All train alike" in table
    _, _, fused, plain, *_ = table.splitlines()
    assert fused.split()[:7] == ["tp2", "2", "0.500", "1.80x", "2,048", "4%", "0.50"]
    assert plain.split()[-3:] == ["20%", "3.9000", "1.0e-06"]  # its memory is not known
    for off in (1e-2, math.nan):
        assert "THEY DIFFER" in str(Comparison(results(off), "fp32"))
    Comparison(results(0.0)[:1], "fp32").draw(tmp_path / "alone.png")
