"""The demo as people start it: by its command, under torchrun, with checkpoints, with a transformers model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fused_tp.cli import demo, demo_launch
from fused_tp.cli.demo_data import ByteTokenizer, make_batch, make_tokens
from fused_tp.cli.demo_model import build_model
from fused_tp.cli.demo_settings import DemoSettings
from fused_tp.cli.demo_train import Trainer

# Three steps of a model whose sizes are no multiples of anything; fp32 losses of a few steps differ by rounding only.
TINY = "--layers 2 --hidden 48 --intermediate 84 --heads 4 --kv-heads 2 --batch 2 --seq 37 --sample-tokens 6"
ROUNDING = 1e-5
# A bf16 number has 3 digits, and sums over ranks round elsewhere than one matmul does.
BF16_ROUNDING = 2e-2


def run_demo(out: Path, line: str) -> dict[str, Any]:
    """Run the demo in ranks of its own and return its demo.json."""
    assert demo.main(parse(f"{line} --out {out}")) == 0
    return read_report(out)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(line.split())


def read_report(out: Path) -> dict[str, Any]:
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "demo.json").read_text())


def losses_of(report: dict[str, Any], run: str) -> list[float]:
    return report["runs"][run]["losses"]


def assert_all_train_alike(report: dict[str, Any], *, within: float) -> None:
    for run in ("plain collectives", "fused_tp"):
        assert losses_of(report, run) == pytest.approx(losses_of(report, "single process"), abs=within), run


def test_context_and_tensor_parallel_train_as_the_single_process(tmp_path: Path) -> None:
    report = run_demo(tmp_path, f"{TINY} --steps 3 --tp 2 --cp 2 --no-sequence-parallel --no-loss-parallel")
    assert_all_train_alike(report, within=ROUNDING)
    losses = losses_of(report, "fused_tp")
    # Three steps of warm-up, each on another batch of a text that differs by Python's version, need not lower the loss.
    assert len(set(losses)) == 3
    assert len(report["sample"]["text"]) > 0 and report["sample"]["tokens"] == 6
    fused = report["runs"]["fused_tp"]
    assert 0 <= fused["waited_share"] < 1 and fused["tokens_per_second"] > 0
    assert fused["largest_difference"] <= ROUNDING


def test_resume_at_another_layout_goes_on_with_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = run_demo(tmp_path / "first", f"{TINY} --steps 2 --tp 2 --save {tmp_path / 'saved'}")
    second = run_demo(tmp_path / "second", f"{TINY} --steps 2 --tp 1 --cp 2 --resume {tmp_path / 'saved'}")
    assert_all_train_alike(first, within=ROUNDING)
    assert_all_train_alike(second, within=ROUNDING)  # the single process resumes too
    together = losses_of(first, "fused_tp") + losses_of(second, "fused_tp")
    assert together == pytest.approx(uninterrupted_losses(4), abs=ROUNDING)
    assert second["steps_in_all"] == 4
    # A model of other sizes: rank 0 finds it, for its unsharded model, and the others lose rank 0.
    assert demo.main(parse(f"{TINY} --steps 1 --layers 1 --intermediate 96 --resume {tmp_path / 'saved'}")) == 2
    assert "gate_proj.weight as (84, 48); this model has it as (96, 48)" in capfd.readouterr().err


def uninterrupted_losses(steps: int) -> list[float]:
    """Of the unsharded model, trained here."""
    settings = DemoSettings.from_arguments(parse(f"{TINY} --tp 1"))
    tokens = make_tokens(ByteTokenizer(), None, seq=settings.seq, vocab_size=256)
    trainer = Trainer(build_model(settings), lr=settings.lr, dtype="fp32", device="cpu")
    batches = [make_batch(tokens, batch=settings.batch, seq=settings.seq, seed=0, step=step) for step in range(steps)]
    return [trainer.step(batch, step) for step, batch in enumerate(batches)]


def test_torchrun(tmp_path: Path) -> None:
    code = f"""
import argparse
from fused_tp.cli import demo
parser = argparse.ArgumentParser()
demo.add_arguments(parser)
raise SystemExit(demo.main(parser.parse_args({[*TINY.split(), "--steps", "1", "--tp", "2", "--out", str(tmp_path)]!r})))
"""
    script = tmp_path / "main.py"
    script.write_text(code)
    root = Path(demo.__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_all_train_alike(read_report(tmp_path), within=ROUNDING)
    assert done.stdout.count("All runs train alike") == 1  # one rank reports


def test_transformers_checkpoint_in_bf16(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=84,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    characters = {"?": 0} | {chr(code): code for code in range(32, 127) if chr(code) != "?"}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    line = f"--hf {tmp_path / 'model'} --batch 2 --seq 37 --sample-tokens 6 --steps 2 --tp 2 --dtype bf16"
    report = run_demo(tmp_path / "out", line)
    assert_all_train_alike(report, within=BF16_ROUNDING)
    assert report["tokenizer"] == "the tokenizer of model"


def test_what_only_the_ranks_can_find_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    assert demo.main(parse(f"{TINY} --tp 1 --data {tmp_path / 'short.txt'}")) == 2
    assert "fused-tp demo: --data has 10 tokens, fewer than one row of 37" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("folder", "device", "how"), [(9, "cpu", "forkserver"), (80, "cpu", "spawn"), (9, "cuda", "spawn")]
)
def test_how_ranks_are_started(folder: int, device: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server has a socket, whose name a long folder for temporary files makes too long."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "x" * folder)
    monkeypatch.setattr(demo_launch.mp, "set_forkserver_preload", lambda modules: None)
    settings: Any = SimpleNamespace(device=device)
    assert demo_launch._start_method(settings, SimpleNamespace(__module__="a_module")) == how  # type: ignore[arg-type]
