"""The demo as people start it: by its command, under torchrun, with checkpoints, with a transformers model."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fused_tp.cli import demo
from fused_tp.cli.demo import DemoSettings
from fused_tp.cli.demo_run import BYTES, Trainer, build_model, make_batch, make_tokens

# A model whose sizes are no multiples of anything; fp32 losses of a few steps differ by rounding only.
TINY = "--layers 2 --hidden 48 --intermediate 84 --heads 4 --kv-heads 2 --batch 2 --seq 37 --sample-tokens 6"
ROUNDING = 1e-5
# A bf16 number has 3 digits, and sums over ranks round elsewhere than one matmul does.
BF16_ROUNDING = 2e-2


def run_demo(out: Path, line: str) -> dict[str, Any]:
    """The demo.json of a run on ranks of its own."""
    assert demo.main(parse(f"{line} --out {out}")) == 0
    return read_report(out)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(line.split())


def read_report(out: Path, *, within: float = ROUNDING) -> dict[str, Any]:
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads((out / "demo.json").read_text())
    for run in ("plain collectives", "fused_tp"):
        assert losses_of(report, run) == pytest.approx(losses_of(report, "single process"), abs=within), run
    return report


def losses_of(report: dict[str, Any], run: str) -> list[float]:
    return report["runs"][run]["losses"]


def test_two_ranks_train_as_the_single_process(tmp_path: Path) -> None:
    report = run_demo(tmp_path, f"{TINY} --steps 2 --tp 2")
    assert len(set(losses_of(report, "fused_tp"))) == 2
    assert len(report["sample"]["text"]) > 0 and report["sample"]["tokens"] == 6
    fused = report["runs"]["fused_tp"]
    assert 0 <= fused["waited_share"] < 1 and fused["tokens_per_second"] > 0
    assert fused["largest_difference"] <= ROUNDING


@pytest.mark.full
def test_resume_at_another_layout_goes_on_with_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    four = "--tp 2 --cp 2 --no-sequence-parallel --no-loss-parallel"
    first = run_demo(tmp_path / "first", f"{TINY} --steps 2 {four} --save {saved}")
    second = run_demo(tmp_path / "second", f"{TINY} --steps 2 --tp 1 --cp 2 --resume {saved}")  # single resumes too
    settings = DemoSettings.from_arguments(parse(f"{TINY} --tp 1"))
    tokens = make_tokens(BYTES, None, seq=settings.seq, vocab_size=256)
    trainer = Trainer(build_model(settings), lr=settings.lr, dtype="fp32", device="cpu")
    batches = [make_batch(tokens, batch=settings.batch, seq=settings.seq, seed=0, step=step) for step in range(4)]
    uninterrupted = [trainer.step(batch, step) for step, batch in enumerate(batches)]
    assert losses_of(first, "fused_tp") + losses_of(second, "fused_tp") == pytest.approx(uninterrupted, abs=ROUNDING)
    assert second["steps_in_all"] == 4
    # A model of other sizes: rank 0 finds it, for its unsharded model, and the others lose rank 0.
    assert demo.main(parse(f"{TINY} --steps 1 --layers 1 --intermediate 96 --resume {saved}")) == 2
    assert "gate_proj.weight as (84, 48); this model has it as (96, 48)" in capfd.readouterr().err
    # What only the ranks can find is a sentence.
    (tmp_path / "short.txt").write_text("Too short.")
    assert demo.main(parse(f"{TINY} --tp 1 --data {tmp_path / 'short.txt'}")) == 2
    assert "fused-tp demo: --data has 10 tokens, fewer than one row of 37" in capfd.readouterr().err


@pytest.mark.full
def test_torchrun(tmp_path: Path) -> None:
    root = Path(demo.__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fused_tp", "demo", *TINY.split(), "--steps", "1", "--tp", "2", "--out", str(tmp_path)]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read_report(tmp_path)
    assert done.stdout.count("All runs train alike") == 1  # one rank reports


@pytest.mark.full
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
    assert demo.main(parse(f"{line} --out {tmp_path / 'out'}")) == 0
    assert read_report(tmp_path / "out", within=BF16_ROUNDING)["tokenizer"] == "the tokenizer of model"


def start_demo(out: Path, line: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fused_tp", "demo", *f"{TINY} {line} --out {out}".split()]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("whom", "sent", "code"),
    [
        ("command", signal.SIGKILL, -signal.SIGKILL),
        ("rank", signal.SIGKILL, 1),
    ],
)
def test_all_end_when_one_is_ended(tmp_path: Path, whom: str, sent: signal.Signals, code: int) -> None:
    command = start_demo(tmp_path, "--steps 100000 --tp 2")
    deadline = time.monotonic() + 60
    while len(ranks := [rank for server in psutil.Process(command.pid).children() for rank in server.children()]) < 2:
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    started = psutil.Process(command.pid).children(recursive=True)
    (psutil.Process(command.pid) if whom == "command" else ranks[1]).send_signal(sent)
    _, said = command.communicate(timeout=20)
    assert command.returncode == code, said
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert whom == "command" or "SIGKILL has ended rank" in said.splitlines()[-1]


def test_a_run_that_diverged_and_cannot_be_saved_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    (saved / "__0_0.distcp").mkdir(parents=True)  # where a file is to be
    assert demo.main(parse(f"{TINY} --steps 3 --lr 1e30 --tp 2 --save {saved} --out {tmp_path}")) == 2
    assert f"fused-tp demo: --save to {saved} failed on rank 0: " in capsys.readouterr().err
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["sample"] is None and (tmp_path / "demo.png").exists()
