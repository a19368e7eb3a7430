"""The demo's parts that need no ranks: its arguments, its text, its baseline switch, its report."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_tp.cli import demo, shipped_module
from fused_tp.cli.demo import DemoSettings
from fused_tp.cli.demo_report import DemoResult, Run, Sample, report, shown_steps, verdict
from fused_tp.cli.demo_run import BYTES, make_tokens, plain_collectives
from fused_tp.cli.main import main
from fused_tp.cli.ranks import start_method
from fused_tp.runtime import settings as runtime_settings

pytestmark = pytest.mark.full

TINY = "--layers 1 --hidden 32 --intermediate 48 --heads 2 --kv-heads 1 --batch 2 --seq 16 --tp 1"


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(line.split())


def settings_of(line: str) -> DemoSettings:
    return DemoSettings.from_arguments(parse(line))


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of("")
    assert (settings.tp, settings.cp, settings.steps, settings.dtype) == (2, 1, 30, "fp32")
    assert settings.sequence_parallel and settings.loss_parallel
    assert (settings.hidden, settings.heads) == (512, 8)
    assert not settings_of("--tp 1").sequence_parallel
    assert not settings_of("--no-sequence-parallel").sequence_parallel
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="--layers given with --hf"):
        settings_of(f"--hf {tmp_path} --layers 3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"torchrun started 3 ranks, but --tp 2 x --cp 2 needs 4"):
        settings_of("--tp 2 --cp 2")


BAD_ARGUMENTS = {
    "--tp 0": "--tp: is 0; it must be at least 1",
    "--steps 0": "--steps: is 0",
    "--seq 1": "--seq: is 1; it must be at least 2",
    "--lr -1": "--lr: is -1.0",
    "--lr 0": "it must be positive",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--device tpu": "--device: invalid choice: 'tpu'",
    "--tp 3": "--heads is 8, which --tp 3 does not divide",
    "--tp 8": "--kv-heads is 4, which --tp 8 does not divide",
    "--hidden 500": "--hidden is 500; 8 heads (--heads) of an even size need a multiple of 16",
    "--heads 6 --hidden 96": "--heads is 6, which --kv-heads 4 does not divide",
    "--tp 1 --sequence-parallel": "--sequence-parallel shards over the tensor-parallel ranks, and --tp is 1",
    "--data no/such/file": "--data: is no/such/file; give a file",
    "--resume no/such/folder": "--resume: is no/such/folder; give a checkpoint",
    f"--out {__file__}": "test_demo.py; give a folder, new or old",
    f"--out {__file__}/new": "test_demo.py/new cannot be made or written to (Not a directory); name another",
    f"--save {__file__}/new": "cannot be made",
    "--device cuda --cp 4096": "--device cuda needs a GPU for each of the 8192 ranks",
    "--hf no/such/folder": "config.json",
    f"--hf {Path(__file__).parent} ": "config.json",
    "--sample-tokens -1": "--sample-tokens: is -1; it must be at least 0",
    "--sample-temperature -1": "--sample-temperature: is -1.0",
    "--prompt=": "--prompt is empty",
    "--seed 4294967296": "--seed is 4294967296; it must be from 0 to 4294967295",
}


@pytest.mark.parametrize("line", BAD_ARGUMENTS)
def test_bad_arguments_get_a_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["demo", *line.split()])
    except SystemExit as end:  # argparse's own
        code = end.code
    assert code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("fused-tp demo: ") and BAD_ARGUMENTS[line] in message


def test_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server has a socket, whose name a long folder for temporary files makes too long."""
    for folder, device, method in [(9, "cpu", "forkserver"), (80, "cpu", "spawn"), (9, "cuda", "spawn")]:
        monkeypatch.setattr(tempfile, "gettempdir", lambda folder=folder: "/" + "x" * folder)
        assert start_method(device) == method


def test_text(tmp_path: Path) -> None:
    tokenizer = BYTES
    tokens = make_tokens(tokenizer, None, seq=256, vocab_size=256)
    assert len(tokens) > 100_000 and tokens.max() < 256
    assert "statement" in tokenizer.decode(tokens[:10_000].tolist())
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    (tmp_path / "text").write_text("abc" * 100)
    with pytest.raises(ValueError, match="token 99"):
        make_tokens(tokenizer, tmp_path / "text", seq=16, vocab_size=99)
    with pytest.raises(ValueError, match="300 tokens, fewer than one row of 512"):
        make_tokens(tokenizer, tmp_path / "text", seq=512, vocab_size=256)


def test_plain_collectives() -> None:
    with plain_collectives():
        assert runtime_settings.forced_schedule() == "plain"
        assert not runtime_settings.shared_memory_allowed()


def test_example_cache_gives_the_logits_of_the_whole_sequence() -> None:
    llama = shipped_module("examples", "llama")
    torch.manual_seed(0)
    model = llama.Llama(llama.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2)).double()
    tokens = torch.randint(256, (2, 13))
    cache = llama.KVCache()
    # First tokens, several more, one by one: the three ways a cache is used.
    parts = [model(part, cache=cache).logits for part in tokens.split([5, 4, 1, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits)
    positions = torch.arange(13).expand(2, 13)
    assert torch.equal(model(tokens, positions=positions).logits, model(tokens).logits)


def make_result(out: Path, **changes: Any) -> DemoResult:
    steps = 12
    losses = [5.0 - 0.1 * step for step in range(steps)]
    near = [loss + 1e-6 for loss in losses]
    return DemoResult(
        settings=replace(settings_of(f"--steps {steps}"), out=out),
        parameters=12_100_000,
        tokenizer="bytes",
        steps_in_all=steps,
        single=Run("single process", 1, 1, losses, [0.9] * steps, [0.0] * steps),
        threaded=Run("single process, all threads", 1, 2, [1.0] * 6, [0.5] * 6, [0.0] * 6),
        plain=Run("plain collectives", 2, 1, near, [9.0] + [0.60] * (steps - 1), [0.12] * steps),
        fused=Run("fused_tp", 2, 1, changes.pop("fused_losses", near), [9.0] + [0.50] * (steps - 1), [0.02] * steps),
        sample=Sample("The ", "sample [text]", 120, 1.0),
        **changes,
    )


def test_report_writes_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    result = make_result(out)
    report(result)
    written = json.loads((out / "demo.json").read_text())
    fused = written["runs"]["fused_tp"]
    assert fused["losses"] == result.fused.losses and len(fused["seconds"]) == 12
    assert fused["step_seconds"] == 0.5 and fused["waited_share"] == pytest.approx(0.04)
    assert fused["tokens_per_second"] == pytest.approx(4 * 256 / 0.5)
    assert fused["largest_difference"] == pytest.approx(1e-6, rel=1e-3)
    assert written["speedup_over_plain"] == pytest.approx(1.2)
    assert written["machine"]["torch"] == torch.__version__
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "1.20x as fast" in printed and "sample [text]" in printed and "train alike" in printed
    for losses in ([5.0] * 12, [float("nan")] * 12):
        assert "DIFFER" in verdict(make_result(tmp_path, fused_losses=losses))
    assert [shown_steps(steps) for steps in (1, 5)] == [[0], [0, 1, 2, 3, 4]]
    assert shown_steps(50) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 49]
