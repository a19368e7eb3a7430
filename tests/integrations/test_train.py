"""Training runs: losses equal one process at other sizes and when resumed at another size; refusals."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from fused_tp.cli.main import main
from fused_tp.cli.train import start_ranks
from fused_tp.planning import build as build_module
from fused_tp.training.export import check_folder
from fused_tp.training.exposure import ExposureReport, analyze
from fused_tp.training.log import RunLog, read_log
from fused_tp.training.run import LossScale, TrainingRun
from fused_tp.training.settings import TrainSettings
from fused_tp.training.traces import read_traces
from tests.workers import error_of, run_fresh

transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = "".join(f"{number} and {number} are {2 * number}; " for number in range(600))


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(6):
        (text / f"{number}.txt").write_text(TEXT[number * 1500 : (number + 1) * 1500])
    return {
        "model": {"type": "llama", "config": {**SIZES, "num_key_value_heads": 2}},
        "data": {"path": str(text), "seq": 64, "evaluation_rows": 16},
        "steps": 6,
        "global_batch": 8,
        "optimizer": {"learning_rate": 3e-3, "warmup": 2},
        **changes,
    }


def train(group: dist.ProcessGroup, runs: list[tuple[dict[str, Any], int | None]]) -> list[Any]:
    """Losses, norms, evaluation loss and sample of each run, which may stop after a step."""
    found = []
    for given, stop in runs:
        with TrainingRun(TrainSettings.from_mapping(given)) as run:
            steps = []
            for step in run.steps():
                steps.append(step)
                if step.number == stop:
                    break
            found.append(([s.loss for s in steps], [s.norm for s in steps], run.evaluate(), run.sample()))
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2},
    {"dp_shard": 2, "tp": 2, "microbatches": 2},
    {"pp": 2, "tp": 2, "microbatches": 4},
    {"pp": 2, "dp_shard": 2, "microbatches": 2, "recompute": "full"},
    {"dp_replicate": 2, "cp": 2, "recompute": "full"},
]


@pytest.mark.long
def test_losses_of_one_process(tmp_path: Path) -> None:
    """Compare losses, also of runs that resume from a checkpoint at another size."""
    sample = {"sample": {"prompt": "1 and", "tokens": 8, "temperature": 0.0}}
    (((losses, norms, evaluation, text),),) = run_fresh(1, train, [(settings_of(tmp_path, **sample), None)])
    assert len(losses) == 6 and losses[-1] < losses[0] and evaluation is not None and text.startswith("1 and")
    runs: list[Any] = [(settings_of(tmp_path, parallel=parallel, **sample), None) for parallel in LAYOUTS]
    saves = {"checkpoints": {"folder": str(tmp_path / "saved"), "every": 2}}
    goes_on = [(settings_of(tmp_path, parallel=LAYOUTS[n], **saves), stop) for n, stop in ((2, 2), (0, 4), (1, None))]
    for rank in run_fresh(4, train, [*runs, *goes_on], timeout=300):
        for parallel, found in zip(LAYOUTS, rank, strict=False):
            assert found[0] == pytest.approx(losses, rel=1e-5), parallel
            assert found[1] == pytest.approx(norms, rel=1e-4), parallel
            assert found[2] == pytest.approx(evaluation, rel=1e-5), parallel
            assert found[3] == text, parallel
        parts = [part[0] for part in rank[len(LAYOUTS) :]]
        assert [len(part) for part in parts] == [2, 2, 2]
        assert [loss for part in parts for loss in part] == pytest.approx(losses, rel=1e-5)
        assert rank[-1][2] == pytest.approx(evaluation, rel=1e-5)


def precisions(group: dist.ProcessGroup, settings: dict[str, Any]) -> list[list[float]]:
    found = []
    for precision in ("fp32", "bf16", "fp16"):
        for parallel in ({"tp": 2}, {"pp": 2, "microbatches": 2}):
            with TrainingRun(
                TrainSettings.from_mapping({**settings, "precision": precision, "parallel": parallel})
            ) as run:
                if precision == "fp16":
                    run._extra_state["loss_scale"] = 2.0**40  # overflows at first
                steps = [*run.steps()]
                skipped = [step.skipped for step in steps]
                assert any(skipped) == (precision == "fp16"), skipped
                if precision == "fp16":
                    assert run._extra_state["loss_scale"] == 2.0 ** (40 - sum(skipped))
                    found.append([steps[0].loss])
                else:
                    found.append([step.loss for step in steps])
    return found


@pytest.mark.full
def test_precisions(tmp_path: Path) -> None:
    for rank in run_fresh(2, precisions, settings_of(tmp_path)):
        wanted = rank[0]
        assert rank[1] == pytest.approx(wanted, rel=1e-5)
        for losses in rank[2:4]:
            assert losses == pytest.approx(wanted, rel=2e-2) and losses != wanted
        for losses in rank[4:]:
            assert losses[0] == pytest.approx(wanted[0], rel=1e-2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 3}, "'step' is not a key"),
        ({"steps": 0}, "'steps' is 0: input should be greater"),
        ({"model": {"type": "llama", "pretrained": "x"}}, "either 'pretrained' or 'type'"),
        ({"optimizer": {"decay": "sudden"}}, "'optimizer.decay' is 'sudden'"),
        ({"machine": "h101"}, "Unknown machine 'h101'"),
        ({"sample": {"prompt": ""}}, "'sample.prompt' is ''"),
        ({"steps": True}, "'steps' is True: input should be a valid integer"),
        ({"seed": 2**63}, "'seed' is 9223372036854775808: input should be less"),
        ({"optimizer": {"betas": [0.9, 2]}}, "'optimizer.betas.1' is 2"),
        ({"optimizer": {"eps": 0}}, "'optimizer.eps' is 0: input should be greater"),
        ({"optimizer": {"learning_rate": math.inf}}, "'optimizer.learning_rate' is inf"),
        ({"data": {}, "evaluate_every": 1}, "evaluate_every=1 needs"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    said = str(error_of(TrainSettings.from_mapping, settings_of(tmp_path, **change)))
    assert says in said and not said.endswith("..")


def refusals(group: dist.ProcessGroup, folder: Path) -> list[str]:
    changes: list[dict[str, Any]] = [
        {"model": {"type": "lama"}},
        {"model": {"type": "llama", "config": {"num_hiden_layers": 2}}},
        {"model": {"type": "llama", "config": {"hidden_size": "wide"}}},
        {"data": {"tokenizer": str(folder)}},
        {"parallel": {"tp": "two"}},
        {"data": {"path": str(folder / "none")}},
        {"data": {"path": str(folder), "seq": 100_000}},
        {"data": {"path": str(folder), "seq": 64, "evaluation_rows": 4}},
        {"parallel": {"tp": 2}},
        {"global_batch": 3, "parallel": {"microbatches": 2}},
        {"model": {"type": "llama", "config": {**SIZES, "vocab_size": 50}}},
        {"data": {"path": str(folder), "seq": 64, "evaluation": str(folder / "tokens.npy")}},
        {"model": {"type": "gpt2", "config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}}},
        {"model": {"type": "llama", "config": {**SIZES, "num_key_value_heads": 3}}},
        {"model": {"type": "llama", "config": {**SIZES, "hidden_act": "foo"}}},
        {"model": {"type": "llama", "config": {**SIZES, "num_attention_heads": 0}}},
    ]
    return [str(error_of(TrainingRun, TrainSettings.from_mapping(settings_of(folder, **change)))) for change in changes]


def test_runs_that_cannot_be(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(-1, 1000))
    says = ("did you mean 'llama'?", "'num_hiden_layers', which is not a key", "expected int", "cannot be loaded")
    says += ("tp must be an int", "does not exist", "at least seq=", "at least global_batch")
    says += ("must be a multiple of 2", "cannot be split into 2 microbatches", "the model's vocabulary is 0 to 49")
    says += ("The text of data.evaluation has token -1", "data.seq must be at most 32")
    says += ("the 3 key/value heads do not divide", "hidden_act cannot be 'foo'", "num_attention_heads cannot be 0")
    (found,) = run_fresh(1, refusals, tmp_path)
    for text, part in zip(found, says, strict=True):
        assert part in text, (part, text)


def goes_on_as_others(group: dist.ProcessGroup, given: dict[str, Any]) -> list[str]:
    """Errors of runs that resume with another model, whose parameters have the same shapes."""
    with TrainingRun(TrainSettings.from_mapping(given)) as run:
        list(run.steps())
    sizes = given["model"]["config"]
    others = {"tie_word_embeddings": True}, {"num_attention_heads": 8, "num_key_value_heads": 4}
    models = [{"type": "llama", "config": {**sizes, **other}} for other in others]
    return [
        str(error_of(TrainingRun, TrainSettings.from_mapping({**given, "steps": 2, "model": model})))
        for model in models
    ]


def test_another_model_of_the_same_shapes_does_not_go_on(tmp_path: Path) -> None:
    given = settings_of(tmp_path, steps=1, checkpoints={"folder": str(tmp_path / "saved"), "every": 1})
    ((tied, heads),) = run_fresh(1, goes_on_as_others, given)
    assert "contains a model with tied=False, got tied=True" in tied
    assert "contains a model with heads=4, got heads=8" in heads


def disk_full(group: dist.ProcessGroup, given: dict[str, Any]) -> tuple[str, int, int, list[float]]:
    """Error of a run that cannot save, first and last step of the next run, and rates of one with other settings."""
    settings = TrainSettings.from_mapping(given)
    with TrainingRun(settings) as run:
        steps = run.steps()
        next(steps), next(steps)
        assert run.checkpoints is not None
        run.checkpoints.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a longer file is an OSError, as on a full disk
        try:
            said = str(error_of(list, steps))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with TrainingRun(settings) as run:
        first, last = run.done_steps, [step.number for step in run.steps()][-1]
    optimizer = {"learning_rate": 1e-4, "warmup": 2, "decay": "constant"}
    changes = {"steps": 8, "optimizer": optimizer, "profile": {"first": 2, "steps": 1}}  # counts its own steps
    with TrainingRun(TrainSettings.from_mapping({**given, **changes})) as run:
        return said, first, last, [step.learning_rate for step in run.steps()]


def test_a_full_disk_loses_no_checkpoint_and_settings_may_change(tmp_path: Path) -> None:
    saves = {"checkpoints": {"folder": str(tmp_path / "saved"), "every": 2}}
    given = settings_of(tmp_path, out=str(tmp_path / "out"), **saves)
    ((said, first, last, rates),) = run_fresh(1, disk_full, given)
    assert "The checkpoint of step 4 was not written" in said and "File too large" in said
    assert (first, last, rates) == (2, 6, [1e-4, 1e-4])
    assert b"step 8" in gzip.decompress((tmp_path / "out" / "traces" / "rank0.json.gz").read_bytes())


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "train.json"
    config.write_text(json.dumps(settings_of(tmp_path, steps=100_000, parallel={"tp": 2}, out=str(tmp_path / "out"))))
    # A shell's background job, as these tests may be, ignores SIGINT, and its child processes inherit that.
    run = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", run, sys.executable, "-m", "fused_tp", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 2:") for line in process.stdout)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert len(started) == 2 and not psutil.wait_procs(started, timeout=30)[1]


@pytest.mark.full
def test_ranks_that_still_import_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "train.json"
    config.write_text(json.dumps(settings_of(tmp_path, steps=100_000, parallel={"tp": 2}, out=str(tmp_path / "out"))))
    with subprocess.Popen([sys.executable, "-m", "fused_tp", "train", str(config)]) as process:
        started: list[psutil.Process] = []
        while len(started) < 2:
            assert process.poll() is None
            time.sleep(0.01)
            started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert not psutil.wait_procs(started, timeout=30)[1]


@pytest.mark.full
def test_what_a_rank_prints_to_or_writes_to_may_go_away(
    tmp_path: Path,
) -> None:
    config = tmp_path / "train.json"
    config.write_text(json.dumps(settings_of(tmp_path, steps=2, parallel={}, out=str(tmp_path / "out"))))
    command = [sys.executable, "-m", "fused_tp", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "its stdout was closed" in process.stderr.read() and process.wait() == 1
    log = RunLog.__new__(RunLog)
    log._file = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log._record("step", {})


@pytest.mark.full
def test_ranks_that_refuse_say_why_and_leave_the_process_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    config, data = tmp_path / "train.json", {"path": str(tmp_path / "short.txt"), "seq": 64}
    config.write_text(json.dumps(settings_of(tmp_path, data=data, parallel={"tp": 2}, out=str(tmp_path / "out"))))
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert start_ranks(2, config, is_quiet=True) == 2
    assert "at least seq=64 tokens, got 5" in capsys.readouterr().err
    assert before == (dict(os.environ), signal.getsignal(signal.SIGTERM))


def test_loss_scales_of_other_precisions() -> None:
    state: dict[str, Any] = {}
    assert LossScale(state, is_used=False).value == 1
    scale = LossScale(state, is_used=True)
    scale.update(is_finite=False)
    state["shape"] = {}
    assert scale.value == 2.0**15 and LossScale(state, is_used=True).value == 2.0**15
    assert LossScale(state, is_used=False).value == 1 and [*state] == ["shape"]


def logged(group: dist.ProcessGroup, given: dict[str, Any]) -> str:
    """Write the log of a run, and return the error of a run with gradients that are not finite."""
    settings = TrainSettings.from_mapping(given)
    with TrainingRun(settings) as run:
        log = RunLog(run, is_writer=True)
        log.start()
        for step in run.steps():
            log.log_step(step)
        log.log_evaluation(run.done_steps, run.evaluate(), None)
        log.close()
    with TrainingRun(TrainSettings.from_mapping({**given, "optimizer": {"learning_rate": 1e30}})) as run:
        return str(error_of(list, run.steps()))


def first_lines(group: dist.ProcessGroup, given: dict[str, Any], capture: Path) -> str:
    with (
        open(capture, "w") as file,
        contextlib.redirect_stdout(file),
        TrainingRun(TrainSettings.from_mapping(given)) as run,
    ):
        RunLog(run, is_writer=True).start()
    return capture.read_text()


@pytest.mark.full
@pytest.mark.parametrize(("p", "ranks"), [(0.1, 2), (0.0, 2), (0.1, 1)])
def test_ranks_say_that_they_drop_otherwise(tmp_path: Path, p: float, ranks: int) -> None:
    model = {"type": "llama", "config": {**SIZES, "attention_dropout": p}}
    given = settings_of(tmp_path, model=model, out=str(tmp_path / "out"), parallel={"tp": ranks})
    said = run_fresh(ranks, first_lines, given, tmp_path / "said")[0]
    assert ("Set dropout to 0 in model.config to compare them" in said) == (p > 0 and ranks > 1)


def test_logs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = settings_of(tmp_path, out=str(out), steps=4, precision="bf16", machine="h100")
    out.mkdir()
    (out / "train.jsonl").write_text('{"kind": "step", "number": 9}\n')  # of another run; this one starts the file anew
    (said,) = run_fresh(1, logged, given)
    assert "are not finite" in said and "overflow is not the cause" in said, said
    log = read_log(out)
    assert [step["number"] for step in log["step"]] == [1, 2, 3, 4]
    assert [one["number"] for one in log["evaluation"]] == [4]
    assert all(step["tokens"] == 8 * 64 and step["tflops_per_rank"] > 0 for step in log["step"])
    assert all(step["mfu"] == pytest.approx(step["tflops_per_rank"] / 989) for step in log["step"])
    assert (out / "report.png").stat().st_size > 1000


# Loads an exported model as a user without fused_tp does; prints logits of a text, and a continuation of it.
LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
given = tokenizer("1 and 1\u00e9", return_tensors="pt")
assert "fused_tp" not in sys.modules and given.input_ids[0].tolist() == list("1 and 1\u00e9".encode())
assert tokenizer.decode(given.input_ids[0]) == "1 and 1\u00e9"
torch.save(model(**given).logits[0], sys.argv[2])
"""
EXPORTED: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "microbatches": 2}, {"dp_shard": 2}]


def exported(group: dist.ProcessGroup, runs: list[dict[str, Any]]) -> list[Any]:
    """Export after two steps, twice; return the logits of LOAD's text in each parallel model."""
    found = []
    for given in runs:
        with TrainingRun(TrainSettings.from_mapping(given)) as run:
            assert len([*run.steps()]) == 2
            run.export()
            run.export()
            tokens = list("1 and 1é".encode())
            found.append(
                torch.stack([run._compute_next_logits(tokens[: end + 1]).detach() for end in range(len(tokens))])
            )
    return found


@pytest.mark.full
def test_exported_models_are_those_that_were_trained(tmp_path: Path) -> None:
    runs = [
        settings_of(tmp_path, steps=2, parallel=parallel, export=str(tmp_path / f"{number}" / "model"))
        for number, parallel in enumerate(EXPORTED)
    ]
    for number, wanted in enumerate(run_fresh(2, exported, runs)[0]):
        folder = tmp_path / f"{number}"
        command = [sys.executable, "-c", LOAD, str(folder / "model"), str(tmp_path / "logits")]
        subprocess.run(command, check=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        torch.testing.assert_close(torch.load(tmp_path / "logits"), wanted.detach(), rtol=1e-4, atol=1e-5)
        assert [path.name for path in folder.iterdir()] == ["model"]
        assert json.loads((folder / "model" / "fused_tp.json").read_text())["step"] == 2
        assert json.loads((folder / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


PRETRAINED: list[dict[str, Any]] = [{"dp_shard": 2}, {"tp": 2}, {"tp": 2, "recompute": "full"}]


def continued(group: dist.ProcessGroup, runs: list[dict[str, Any]]) -> list[list[float]]:
    """Return the losses of each run, and check which of them read their checkpoint by shards."""
    found = []
    for given in runs:
        with (
            mock.patch.object(build_module, "load_pretrained", wraps=build_module.load_pretrained) as load,
            TrainingRun(TrainSettings.from_mapping(given)) as run,
        ):
            assert load.called == ("tp" in given["parallel"])
            found.append([step.loss for step in run.steps()])
    return found


def test_pretrained_models_are_read_by_shards(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=256)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    runs = [
        settings_of(tmp_path, steps=2, parallel=parallel, model={"pretrained": str(tmp_path / "model")})
        for parallel in PRETRAINED
    ]
    whole, *by_shards = run_fresh(2, continued, runs)[0]
    for losses in by_shards:
        assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.long
def test_train_exports_also_when_all_steps_are_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, folder = tmp_path / "train.json", tmp_path / "model"
    saves = {"checkpoints": {"folder": str(tmp_path / "saved")}, "out": str(tmp_path / "out"), "steps": 1}
    config.write_text(json.dumps(settings_of(tmp_path, parallel={"tp": 2}, **saves)))
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), "--set", f"export={folder}"]) == 0
    assert f"The model is in {folder}" in capfd.readouterr().out and (folder / "model.safetensors").exists()


def test_export_takes_no_folder_in_use(tmp_path: Path) -> None:
    def refusal(folder: Path, **changes: Any) -> str:
        return str(
            error_of(check_folder, TrainSettings.from_mapping(settings_of(tmp_path, export=str(folder), **changes)))
        )

    assert "contains files that no export has written" in refusal(tmp_path)
    assert "must be a folder" in refusal(tmp_path / "text" / "0.txt")
    assert "the run starts from the model in" in refusal(tmp_path / "new", model={"pretrained": str(tmp_path / "new")})
    check_folder(TrainSettings.from_mapping(settings_of(tmp_path, export=str(tmp_path / "new"))))
    (tmp_path / "fused_tp.json").touch()
    check_folder(TrainSettings.from_mapping(settings_of(tmp_path, export=str(tmp_path))))


PROFILED: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2, "microbatches": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2, "recompute": "full"},
]


def profiled(group: dist.ProcessGroup, runs: list[dict[str, Any]]) -> None:
    """Profile all runs; in the one over tensor parallel ranks, rank 1 is slow in an MLP."""
    for given in runs:
        with TrainingRun(TrainSettings.from_mapping(given)) as run:
            if run.config.tp == 2 and group.rank() == 1:
                run.model.model.layers[2].mlp.register_forward_hook(lambda *_: time.sleep(0.05))
            assert len([*run.steps()]) == 6


def report_of(folder: Path) -> ExposureReport:
    report = analyze(read_traces([folder]))
    for rank in report.ranks:
        assert rank.step == pytest.approx(rank.compute + rank.exposed + rank.bubble + rank.idle)
        assert min(rank.compute, rank.hidden, rank.exposed, rank.bubble) >= 0 and 0 < rank.compute < rank.step
    return report


@pytest.mark.full
def test_profile(tmp_path: Path) -> None:
    profile = {"first": 3, "steps": 2}
    names = ["-".join(parallel) for parallel in PROFILED]
    outs = [{"parallel": PROFILED[n], "out": str(tmp_path / name), "profile": profile} for n, name in enumerate(names)]
    run_fresh(2, profiled, [settings_of(tmp_path, **out) for out in outs])
    report = report_of(tmp_path / "tp")
    late = max(report.ranks, key=lambda rank: rank.waited_for)
    assert (late.rank, late.cause) == (1, "model.layers.2.mlp") and late.waited_for > 0.04 and late.more > 0.04
    assert {"matmul_reduce_scatter", "all_gather_matmul"} <= {op.op for op in report.ops if op.group == "tp"}
    report = report_of(tmp_path / "pp-microbatches")
    assert all(rank.bubble > 0 for rank in report.ranks) and "recv" in {op.op for op in report.ops}
    assert "all_gather" in {op.op for op in report_of(tmp_path / "dp_shard").ops}
    assert report_of(tmp_path / "dp_replicate-recompute").ops[0].group == "dp_replicate"


@pytest.mark.full
def test_profile_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "train.json", tmp_path / "report"
    config.write_text(json.dumps(settings_of(tmp_path)))
    assert main(["report", "--live", str(config), "--steps", "2", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranks"]) == 1 and found["ranks"][0]["compute"] > 0 and not found["notes"]
    assert (out / "traces" / "rank0.json.gz").exists() and (out / "report.png").stat().st_size > 1000
    assert main(["report", "--live", str(config), "--set", "data.seq=1", "--out", str(out)]) == 2
    assert "'data.seq' is 1" in capsys.readouterr().err


def test_profile_of_steps_that_do_not_come(tmp_path: Path) -> None:
    given = settings_of(tmp_path, profile={"first": 6, "steps": 2})
    assert "profile records steps 6 to 7, but the run ends with step 6" in str(
        error_of(TrainSettings.from_mapping, given)
    )
