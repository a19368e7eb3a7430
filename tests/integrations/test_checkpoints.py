"""CheckpointManager: state restored bit for bit at any size, and saves that fail or are interrupted."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fused_tp
from fused_tp import CheckpointManager, DistributedBatches
from fused_tp.nn.sharding import as_dtensors, packed_dims
from fused_tp.pipelining import Pipeline
from fused_tp.training.checkpoints import _compute_checksum, _describe_error
from tests.integrations.models import make, make_tokens, mesh_of
from tests.workers import REPOSITORY, error_of, run_fresh, run_ranks


def make_parallel(group: dist.ProcessGroup, layout: str, whole: Any) -> Any:
    if layout == "one":
        return whole
    if layout == "fsdp3":
        for layer in [*whole.model.layers, whole]:
            fully_shard(layer)
        return whole
    if layout in ("pp2", "zbv2", "pp2_tp2"):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
        if layout == "pp2_tp2":
            mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "tp"))
        return fused_tp.pipeline(whole, mesh, microbatches=2, schedule="ZBV" if layout == "zbv2" else "1F1B")
    if layout.startswith("dp2"):
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp_shard", layout[4:6]))
        model = fused_tp.parallelize(whole, mesh, grad_sync=False)
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh))
        return model
    cp, tp = {"tp2": (1, 2), "cp2": (2, 1), "plain_tp2": (1, 2), "plain_cp2_tp2": (2, 2)}[layout]
    parameters = "plain" if layout.startswith("plain") else "dtensor"
    return fused_tp.parallelize(whole, mesh_of(group, cp, tp), parameters=parameters)


def modules_of(model: Any) -> list[nn.Module]:
    return [stage.model for stage in model.stages.values()] if isinstance(model, Pipeline) else [model]


def whole_state(group: dist.ProcessGroup, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state of the unsharded model, put together without torch.distributed.checkpoint."""
    found: dict[str, Any] = {}
    for module in modules_of(model):
        parts, cuts = packed_dims(module), as_dtensors(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):

            def full(t: Tensor, parameter: Any = parameter, parts: Any = parts, cuts: Any = cuts) -> Tensor:
                cut = cuts.get(id(parameter))
                if cut is not None and t.shape == parameter.shape:
                    keywords = {"run_check": False, "shape": cut.shape, "stride": cut.stride()}
                    t = DTensor.from_local(t.detach(), cut.device_mesh, cut.placements, **keywords)
                t = t.full_tensor() if isinstance(t, DTensor) else t
                dim = parts.get(id(parameter))
                return t.detach().clone() if dim is None or not t.ndim else t.detach().flatten(dim, dim + 1)

            found[name] = full(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name} {key}"] = full(value) if isinstance(value, Tensor) else value
    if group is None:
        return found
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, found, group=group)
    return {name: value for one in ranks for name, value in one.items()}


def take_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = make_tokens(4, 12)
    if isinstance(model, Pipeline):
        model.step({model._token_names[0]: tokens, "labels": tokens})
    else:
        model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW with param groups that differ between layouts."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.97))


def go_on(group: Any, layouts: list[str], family: str, changes: Any, folder: Path, first: int) -> list[dict[str, Any]]:
    """Restore and save the run in one layout after another, and return the states. The first layout has nothing to
    restore and trains a step."""
    states = []
    for step, layout in enumerate(layouts, first):
        whole = make(family, **changes)
        with torch.no_grad():
            for p in whole.parameters():
                p *= float(step == 1)  # a value that is not restored stays 0
        next(iter(whole.model.layers[0].parameters())).requires_grad_(False)
        model = make_parallel(group, layout, whole)
        optimizer = optimizer_of(model)
        with CheckpointManager(folder, model, optimizer, keep=2) as checkpoints:
            assert checkpoints.restore() == (step - 1 or None), layout
            if step == 1:
                take_step(model, optimizer)
            states.append(whole_state(group, model, optimizer))
            checkpoints.save(step)
        assert sorted({one["lr"] for one in optimizer.param_groups}) == [1e-3, 3e-3]
    return states


def go_on_with_all(group: Any, cases: list[Any], folder: Path) -> list[list[dict[str, Any]]]:
    return [
        go_on(group, layouts, family, changes, folder / str(number), first)
        for number, (family, changes, layouts, first) in enumerate(cases)
    ]


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    assert set(found) == set(wanted), (what, set(wanted) ^ set(found))
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, (what, name)


FAMILIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "plain": [("plain", {"num_hidden_layers": 4}), ("plain", {"num_hidden_layers": 4, "tied": True})],
    # qwen3_moe has packed parameters.
    "transformers": [("llama", {"num_hidden_layers": 4}), ("qwen3_moe", {"num_hidden_layers": 2})],
}
# Passes in the order in which they run.
PASSES: list[tuple[int, Any, list[str]]] = [
    (4, run_ranks, ["dp2_tp2"]),
    (2, run_fresh, ["tp2", "cp2", "plain_tp2", "pp2", "zbv2"]),
    (3, run_fresh, ["fsdp3"]),
    (4, run_ranks, ["pp2_tp2", "plain_cp2_tp2", "dp2_cp2"]),
    (1, None, ["one"]),
    (4, run_ranks, ["dp2_tp2"]),
]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param("plain", (1, 4), marks=pytest.mark.long),
        pytest.param("plain", (1, 2, 3, 4), marks=pytest.mark.full),
        pytest.param("transformers", (1, 2, 4), marks=pytest.mark.full),
    ],
)
def test_another_size(kind: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    families = FAMILIES[kind]
    found: list[list[dict[str, Any]]] = [[] for _ in families]
    for ranks, run, layouts in PASSES:
        if ranks not in sizes:
            continue
        cases = []
        for (family, changes), states in zip(families, found, strict=True):
            fit = [
                one for one in layouts if one != "zbv2" or changes["num_hidden_layers"] == 4
            ]  # a layer for each stage
            cases.append((family, changes, fit, len(states) + 1))
        new = go_on_with_all(None, cases, tmp_path) if run is None else run(ranks, go_on_with_all, cases, tmp_path)[0]
        for states, more in zip(found, new, strict=True):
            states += more
    for number, ((family, _), states) in enumerate(zip(families, found, strict=True)):
        assert any(name.endswith("exp_avg_sq") for name in states[0])
        for i, state in enumerate(states[1:], 1):
            assert_equal(state, states[0], f"{family}, state {i}")
        names = [f"step-{step:08d}" for step in (len(states) - 1, len(states))]
        assert sorted(path.name for path in (tmp_path / str(number)).iterdir()) == names


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(3, 5), nn.Linear(5, 2, bias=False), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(nn.functional.dropout(self.first(x), 0.5)))


class Run:
    """A small training run whose state can be saved completely."""

    def __init__(self, folder: Path, **keywords: Any) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        dataset = [torch.tensor([i, i * i, 1.0]) for i in range(22)]
        self.batches = DistributedBatches(dataset, None, 4, shuffle=True, epochs=None)
        self.extra: dict[str, Any] = {"seen": 0}
        self.checkpoints = CheckpointManager(
            folder, self.model, self.optimizer, self.scheduler, self.batches, extra=self.extra, **keywords
        )

    def train(self, first: int, last: int, save_every: int = 1) -> list[Any]:
        found = []
        for step, batch in zip(range(first, last + 1), self.batches, strict=False):
            loss = self.model(batch).square().mean() * random.random() * np.random.rand()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.extra["seen"] += len(batch)
            found.append((loss.item(), self.scheduler.get_last_lr(), self.extra["seen"]))
            if step % save_every == 0:
                self.checkpoints.save(step)
        return found


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_goes_on_as_if_never_interrupted(async_save: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, async_save=async_save)
    assert run.checkpoints.restore() is None  # nothing is there
    wanted = run.train(1, 11, save_every=4)
    state = run.model.state_dict()
    run.checkpoints.close()
    run.checkpoints.close()
    assert "closed" in str(error_of(run.checkpoints.save, 12))
    with Run(tmp_path).checkpoints as checkpoints:
        assert checkpoints.restore() == 8
    again = Run(tmp_path)
    random.seed(5)
    assert again.checkpoints.restore() == 8
    assert again.train(9, 11, save_every=4) == wanted[8:]
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    broken = tmp_path / "step-00000002"
    broken.mkdir()
    (broken / "__0_0.distcp").write_bytes(b"interrupted")
    for stays in ("step-00000099", "step-later", "notes"):
        (tmp_path / stays).mkdir()  # an interrupted save newer than any complete one; other files
    run.train(1, 1)
    run.checkpoints.wait()
    assert {path.name for path in tmp_path.iterdir()} >= {"step-00000001", "step-00000002"}
    run.train(2, 5)  # one save waits for the other
    run.checkpoints.wait()
    left = ["notes", "step-00000004", "step-00000005", "step-00000099", "step-later"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert "is already complete" in str(error_of(run.checkpoints.save, 5))
    assert "step must be above 5" in str(error_of(run.checkpoints.save, 3))
    (tmp_path / "step-00000005" / "complete.pt").unlink()
    assert run.checkpoints.restore() == 4
    run.train(5, 5)  # overwrites the incomplete checkpoint
    assert run.checkpoints.restore() == 5
    assert [path.name for path in (tmp_path / "step-00000005").iterdir() if "part" in path.name] == []


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1, 3)
    run.checkpoints.wait()
    weights = copy.deepcopy(run.model.state_dict())
    (data,) = (tmp_path / "step-00000003").glob("*.distcp")
    whole = data.read_bytes()
    middle = len(whole) // 2
    for damage in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        data.write_bytes(damage)
        said = str(error_of(run.checkpoints.restore))
        assert f"{data} is damaged: it is missing, or its checksum differs. Remove {data.parent}" in said
        data.write_bytes(whole)
    metadata = data.parent / ".metadata"
    metadata.rename(tmp_path / "away")
    assert f"{metadata} is damaged" in str(error_of(run.checkpoints.restore))
    (tmp_path / "away").rename(metadata)
    data.unlink()
    assert "is damaged" in str(error_of(run.checkpoints.restore))
    complete = data.parent / "complete.pt"
    complete.write_bytes(complete.read_bytes()[:100])
    assert f"{complete} is damaged" in str(error_of(run.checkpoints.restore))
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, weights[name])
    shutil.rmtree(data.parent)
    assert run.checkpoints.restore() == 2


def test_errors_of_saves_are_raised_by_the_next_call(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "step-00000003").write_text("in the way")
    run.train(1, 3)
    error = error_of(run.checkpoints.save, 4)
    assert isinstance(error, fused_tp.FusedTPError) and "The checkpoint of step 3 was not written" in str(error)
    assert run.checkpoints.restore() == 2
    run.extra["more"] = (1, "two")
    run.checkpoints.save(4)
    run.checkpoints.wait()
    (tmp_path / "step-00000005").write_text("in the way")
    run.checkpoints.save(5)
    assert "of step 5" in str(error_of(run.checkpoints.close))
    waits = Run(tmp_path, async_save=False)
    assert "of step 5" in str(error_of(waits.checkpoints.save, 5))
    with pytest.raises(KeyboardInterrupt), waits.checkpoints:
        raise KeyboardInterrupt
    assert "the run exited during the save; earlier checkpoints" in str(error_of(waits.checkpoints.save, 5))
    (tmp_path / "step-00000005").unlink()
    waits.checkpoints.save(5)
    assert "another run uses" in str(error_of(waits.checkpoints.save, 5))
    assert _describe_error(RuntimeError("Connection closed. \nframe #0: of C++")) == "RuntimeError: Connection closed."


def test_state_of_other_dtypes_and_values(tmp_path: Path) -> None:
    """Restore custom optimizer state, which torch's load_state_dict would round to the dtype of the parameters."""

    def make_optimizer() -> tuple[nn.Linear, torch.optim.Optimizer]:
        layer = nn.Linear(3, 2, bias=False).bfloat16()
        return layer, torch.optim.SGD([layer.weight], lr=torch.tensor(0.1), momentum=0.9)

    layer, optimizer = make_optimizer()
    value = torch.full((2, 3), 1 / 3)
    optimizer.state[layer.weight] = {"momentum_buffer": value, "calls": 3, "rows": torch.arange(2.0), "none": None}
    with CheckpointManager(tmp_path, layer, optimizer) as checkpoints:
        checkpoints.save(1)
    layer, optimizer = make_optimizer()
    with CheckpointManager(tmp_path, layer, optimizer) as checkpoints:
        checkpoints.restore()
    state = optimizer.state[layer.weight]
    assert state["momentum_buffer"].dtype == torch.float32 and torch.equal(state["momentum_buffer"], value)
    assert state["calls"] == 3 and state["none"] is None
    assert torch.equal(state["rows"], torch.arange(2.0)) and torch.equal(
        optimizer.param_groups[0]["lr"], torch.tensor(0.1)
    )


def test_param_groups_may_change(tmp_path: Path) -> None:
    model = Small()
    first = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path / "one", model, first) as checkpoints:
        checkpoints.save(1)
    weights, biases = [model.first.weight, model.last.weight], [model.first.bias]
    second = torch.optim.AdamW([{"params": biases, "lr": 1.0}, {"params": weights}], lr=2.0)
    with CheckpointManager(tmp_path / "one", model, second) as checkpoints:
        checkpoints.restore()
        assert [group["lr"] for group in second.param_groups] == [0.1, 0.1]
    second.param_groups[0]["lr"] = 1.0
    with CheckpointManager(tmp_path / "two", model, second) as checkpoints:
        checkpoints.save(1)
    for optimizer, says in (
        (torch.optim.AdamW([*weights, *biases]), "groups with different options"),
        (first, "has no optimizer state of 'norm.weight'"),
    ):
        with CheckpointManager(tmp_path / "two", model, optimizer) as checkpoints:
            assert says in str(error_of(checkpoints.restore))


def refusals(group: dist.ProcessGroup, folder: Path) -> None:
    mesh = mesh_of(group, 2, 2)
    rank, model = dist.get_rank(), fused_tp.parallelize(make("plain"), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    other = fused_tp.parallelize(make("plain", vocab_size=68), mesh)
    fewer = fused_tp.parallelize(make("plain", num_hidden_layers=1), mesh)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("model must be", "model", {}),
        ("optimizer must be", model, {"optimizer": 3}),
        ("scheduler must have", model, {"scheduler": 3}),
        ("data must be DistributedBatches", model, {"data": []}),
        ("keep is 0", model, {"keep": 0}),
        ("async_save must be a bool", model, {"async_save": 1}),
        ("has a parameter of shape (67, 32)", model, {"optimizer": torch.optim.SGD(make("plain").parameters())}),
    ]
    for says, given, keywords in cases:
        error = error_of(CheckpointManager, folder, given, **keywords)
        assert isinstance(error, (TypeError, ValueError)) and says in str(error), (says, error)
    error = error_of(CheckpointManager, folder / str(rank // 2), model)
    assert "ranks 2 and 3 of 4 cannot see" in str(error)
    (folder / "file").touch()
    assert "rank 0 cannot write" in str(error_of(CheckpointManager, folder / "file", model))
    with CheckpointManager(folder, model, optimizer) as checkpoints:
        checkpoints.save(rank // 3)
        error = error_of(checkpoints.wait)
        assert "all ranks must save the same step, got 0 and 1" in str(error)
        optimizer.state[model.lm_head.weight]["rows"] = torch.ones(7)
        assert "its sharding is unknown" in str(error_of(checkpoints.save, 2))
        optimizer.state.clear()
        checkpoints.save(3)
        checkpoints.wait()
        before = {name: p.to_local().clone() for name, p in other.named_parameters()}
        dist.barrier(group)
    for says, given, keywords in (
        ("(68, 32) in this model, but ", other, {}),
        ("contains 'model.layers.1.", fewer, {}),
        ("was saved without extra", model, {"extra": {}}),
        (
            f"state of {type(optimizer).__name__}, got RMSprop",
            model,
            {"optimizer": torch.optim.RMSprop(model.parameters())},
        ),
    ):
        with CheckpointManager(folder, given, **keywords) as checkpoints:
            error = error_of(checkpoints.restore)
            assert isinstance(error, ValueError) and says in str(error), (says, error)
    for name, p in other.named_parameters():
        assert torch.equal(p.to_local(), before[name])
    # Without an optimizer only the model is restored.
    with CheckpointManager(folder, model) as checkpoints:
        assert checkpoints.restore() == 3


def test_what_is_refused(tmp_path: Path) -> None:
    run_ranks(4, refusals, tmp_path)


def random_numbers(group: Any, folder: Path, restore: bool) -> tuple[list[float], int | None]:
    model = nn.Linear(2, 2)
    with CheckpointManager(folder, model) as checkpoints:
        step = checkpoints.restore() if restore else None
        if not restore:
            torch.manual_seed(dist.get_rank())
            random.seed(dist.get_rank())
            checkpoints.save(1)
        return [torch.rand(()).item(), random.random()], step


def test_random_numbers(tmp_path: Path) -> None:
    wanted = [numbers for numbers, _ in run_ranks(4, random_numbers, tmp_path, False)]
    assert len({str(numbers) for numbers in wanted}) == 4
    assert [numbers for numbers, _ in run_ranks(4, random_numbers, tmp_path, True)] == wanted
    assert random_numbers(None, tmp_path, True) == (wanted[0], 1)  # at another number of ranks: rank 0's


# -- ranks that die ---------------------------------------------------------------------------------------------------


def train_resilient(folder: Path, ranks: int, killed: str = "") -> str:
    """Output of examples.train_resilient; `killed` names the ranks that die, in the format of killed.py."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60", "PYTHONPATH": str(REPOSITORY)}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "2", "-m", *(["tests.integrations.killed", killed] if killed else [EXAMPLE])]
    command += ["--folder", str(folder), "--steps", "8", "--save-every", "2"]
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "PeerLostError" in done.stderr or not killed
    return done.stdout


EXAMPLE = "examples.train_resilient"


def saved_state(folder: Path, scratch: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by name."""
    dcp_to_torch_save(folder, scratch)
    tensors = torch.load(scratch, weights_only=False)
    common = torch.load(folder / "complete.pt", weights_only=False)
    del common["checksums"]  # of files, which may store equal tensors in another order
    # Only torch's: the example does not seed Python's and NumPy's.
    common["random"] = [state["torch"].tolist() for state in common["random"]]
    flat = {f"{name} {key}": t for name, own in tensors["optimizer"].items() for key, t in own.items()}
    return {**tensors["model"], **flat, "common": repr(common)}


@pytest.mark.long
def test_a_killed_rank_changes_nothing(tmp_path: Path) -> None:
    """Kill a rank while a checkpoint is being written, which is then not used, and one in the middle of a step."""
    losses = re.findall(r"step (\d+): loss ([\d.]+)", train_resilient(tmp_path / "whole", 4))
    assert [int(step) for step, _ in losses] == list(range(1, 9))
    wanted = saved_state(tmp_path / "whole" / "step-00000008", tmp_path / "scratch")
    assert len(wanted) > 60
    folder = tmp_path / "killed"
    said = train_resilient(folder, 4, "1:save:2,3:step:4")
    printed = re.findall(r"step (\d+): loss ([\d.]+)", said)
    assert dict(printed) == dict(losses)
    assert printed.count(losses[2]) == 2  # the checkpoint of step 4 was not complete
    assert printed.count(losses[4]) == 2  # step 6 was interrupted; the newest checkpoint was that of step 4
    found = saved_state(folder / "step-00000008", tmp_path / "scratch")
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


# -- files of others ---------------------------------------------------------------------------------------------------


class Runs:
    """Object whose unpickling runs code: it creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)

    def __deepcopy__(self, memo: Any) -> Runs:
        return self


class Holding(nn.Linear):
    """Layer with extra state that is not a tensor."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None: ...


def test_plain_data_come_back(tmp_path: Path) -> None:
    plain = {
        "best": np.float64(0.5),
        "seen": {1, 2},
        "mean": np.arange(3.0),
        "names": ["a", ("b", None)],
        "t": torch.ones(2),
    }
    extra, model = dict(plain), nn.Linear(2, 2)
    with CheckpointManager(tmp_path, model, extra=extra) as checkpoints:
        checkpoints.save(1)
        extra.clear()
        assert checkpoints.restore() == 1
    assert repr(extra) == repr(plain)


@pytest.mark.parametrize("where", ["complete.pt", ".metadata", "value"])
def test_restoring_runs_no_code_of_the_files(tmp_path: Path, where: str) -> None:
    marker, model = tmp_path / "was run", Holding(2, 2)
    folder, extra = tmp_path / "run", {"mine": 1}
    evil = Runs(marker)
    with CheckpointManager(folder, model, extra=extra, async_save=False, pickles=True) as checkpoints:
        model.held = evil if where == "value" else None
        checkpoints.save(1)
        step = folder / "step-00000001"
        if where == ".metadata":
            metadata = pickle.loads((step / ".metadata").read_bytes())
            metadata.planner_data["mine"] = evil
            (step / ".metadata").write_bytes(pickle.dumps(metadata))
        common = torch.load(step / "complete.pt", weights_only=False)
        common["checksums"][".metadata"] = _compute_checksum(step / ".metadata")
        if where == "complete.pt":
            common["extra"] = evil
        torch.save(common, step / "complete.pt")
    model.held = None
    with CheckpointManager(folder, model, extra=extra) as checkpoints:
        with pytest.raises(BaseException, match=r"mkdir") as raised:
            checkpoints.restore()
        assert where != "complete.pt" or "pickles=True" in str(raised.value)
    assert not marker.exists()
    with CheckpointManager(folder, model, extra=extra, pickles=True) as checkpoints, suppress(Exception):
        checkpoints.restore()
    assert marker.exists()


def test_what_is_not_plain_is_refused_where_it_is_saved(tmp_path: Path) -> None:
    holds = Holding(2, 2)
    holds.held = random.Random(1)
    with (
        CheckpointManager(tmp_path, holds) as checkpoints,
        pytest.raises(ValueError, match=r"_extra_state.* holds .*Random"),
    ):
        checkpoints.save(1)
    extra = {"mine": Small()}
    with (
        CheckpointManager(tmp_path, nn.Linear(2, 2), extra=extra) as checkpoints,
        pytest.raises(ValueError, match=r"extra holds .*Small, which can only be stored as a pickle.*pickles=True"),
    ):
        checkpoints.save(1)
    with CheckpointManager(tmp_path, nn.Linear(2, 2), extra=extra, pickles=True) as checkpoints:
        checkpoints.save(1)
        assert checkpoints.restore() == 1
    with (
        CheckpointManager(tmp_path, nn.Linear(2, 2), extra=extra) as checkpoints,
        pytest.raises(ValueError, match=r"Small, and loading.*pickles=True"),
    ):
        checkpoints.restore()
