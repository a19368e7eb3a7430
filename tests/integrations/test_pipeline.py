"""`pipeline(model, mesh)`: losses and gradients equal the whole model's, for every schedule, with TP and CP."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import parallelize_module

import fused_tp
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.nn.sharding import packed_dims
from fused_tp.pipelining import Pipeline, Span, bubble, draw, dw_builder, share_out
from fused_tp.pipelining.schedules import SCHEDULES
from tests.integrations.models import TOLERANCE, assert_near, copy_of, full, make, make_tokens
from tests.integrations.sweep import make_model
from tests.integrations.test_sharding_check import log_lines
from tests.integrations.test_step_check import OtherGradient
from tests.reference import refuses, seeded
from tests.tiers import quick
from tests.workers import error_of, fresh_ranks, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

# Both for models in float64, with sums over ranks and microbatches in another order. transformers computes norms and
# losses in float32, where a difference in the last bit of float64 sometimes becomes one of float32.
EXACT, TRANSFORMERS = 1e-12, 1e-6


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh of all four ranks."""
    return DeviceMesh("cpu", torch.arange(4).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def mean_loss(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def assert_same_gradients(pipe: Pipeline, whole: nn.Module, tolerance: float) -> None:
    expected, parts = dict(whole.named_parameters()), {}
    for stage in pipe.stages.values():
        parts |= packed_dims(stage.model)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None, name
        found = full(parameter.grad)
        if (dim := parts.get(id(parameter))) is not None:
            found = found.flatten(dim, dim + 1)
        wanted = expected[name] if name in expected else whole.get_parameter(name)
        assert_near(found, wanted.grad, f"gradient of {name}", tolerance)


def batch_of(family: str, seq: int) -> dict[str, Tensor]:
    tokens = make_tokens(8, seq)
    if family == "plain":
        return {"tokens": tokens, "labels": tokens.roll(1, 1)}
    labels = tokens.clone()
    labels[0, : seq // 2] = -100  # microbatches have unequal numbers of targets: a mean of means would show
    return {"input_ids": tokens, "labels": labels}


def loss_of(whole: nn.Module, batch: dict[str, Tensor], own_loss: bool) -> Tensor:
    if own_loss:
        return whole(**batch).loss
    return mean_loss(whole(*(value for name, value in batch.items() if name != "labels")), batch["labels"])


def compare(
    mesh: DeviceMesh, family: str, *, seq: int = 16, sizes: Any = None, dtype: Any = torch.float64, **keywords: Any
) -> Pipeline:
    """Compare the loss and every gradient of two steps; the second accumulates on the first."""
    # torch has no grouped matmul in float64.
    whole = make(family, **{"num_hidden_layers": 4, **(sizes or {})}).to(dtype).train()
    batch, own_loss = batch_of(family, seq), "loss_fn" not in keywords
    tolerance = EXACT if keywords.get("loss_fn") is mean_loss and family == "plain" else TRANSFORMERS
    tolerance = TOLERANCE if dtype is torch.float32 else tolerance
    pipe = fused_tp.pipeline(copy_of(whole), mesh, **keywords)
    for step in range(2):
        expected = loss_of(whole, batch, own_loss)
        expected.backward()
        assert_near(pipe.step(batch), expected, f"loss {step}", tolerance)
        assert_same_gradients(pipe, whole, tolerance)
    whole.zero_grad()
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(batch, sync_gradients=False)
    pipe.step(batch)
    (2 * loss_of(whole, batch, own_loss)).backward()
    assert_same_gradients(pipe, whole, tolerance)
    loss = pipe.eval(batch)
    assert_near(loss, loss_of(whole, batch, own_loss), "loss without gradients", tolerance)
    assert all(stage.training for stage in pipe.stages.values())
    output = pipe.eval({name: value for name, value in batch.items() if name != "labels"})
    if len(pipe.parts) - 1 in pipe.stages:
        logits = output if isinstance(output, Tensor) else output[0]
        wanted = whole(*(value for name, value in batch.items() if name != "labels")) if family == "plain" else None
        wanted = whole(**{**batch, "labels": None}) if wanted is None else wanted
        assert_near(logits, wanted.logits, "logits", tolerance)
    else:
        assert output is None
    return pipe


@on_ranks(4)
@pytest.mark.parametrize(
    ("schedule", "family", "sequence_parallel"),
    quick(
        itertools.product(sorted(SCHEDULES), ["plain", "llama"], [False, True]),
        ("1F1B", "llama", True),
        ("ZBVZeroBubble", "plain", False),
    ),
)
def test_every_schedule_with_tensor_parallel_stages(
    group: dist.ProcessGroup, schedule: str, family: str, sequence_parallel: bool
) -> None:
    keywords = {"loss_fn": mean_loss} if family == "plain" else {}
    pipe = compare(
        mesh_of(pp=2, tp=2),
        family,
        seq=15,  # uneven over the tensor parallel ranks
        schedule=schedule,
        microbatches=4,
        sequence_parallel=sequence_parallel,
        **keywords,
    )
    assert len(pipe.stages) == (1 if schedule in ("GPipe", "1F1B") else 2)


@on_ranks(4)
@pytest.mark.parametrize(
    ("family", "schedule"), quick(itertools.product(["plain", "llama"], ["1F1B", "ZBV"]), ("llama", "1F1B"))
)
def test_context_parallel_stages(group: dist.ProcessGroup, family: str, schedule: str) -> None:
    compare(mesh_of(pp=2, cp=2), family, schedule=schedule, microbatches=4)


@on_ranks(4)
@pytest.mark.parametrize(
    ("family", "layout", "schedule"),
    [
        *quick(
            itertools.product(["llama"], ["pp", "pp_tp", "pp_tp_lossparallel", "pp_cp"], ["1F1B", "DualPipeV"]),
            ("llama", "pp_tp", "1F1B"),
        ),
        pytest.param("plain", "pp", "DualPipeV", marks=pytest.mark.full),
    ],
)
def test_tied_weights(group: dist.ProcessGroup, family: str, layout: str, schedule: str) -> None:
    mesh = {"pp": mesh_of(pp=4), "pp_cp": mesh_of(pp=2, cp=2)}.get(layout, mesh_of(pp=2, tp=2))
    layers = 8 if layout == "pp" else 4
    pipe = compare(
        mesh,
        family,
        sizes={"num_hidden_layers": layers, "tied": True},
        schedule=schedule,
        microbatches=8,
        loss_parallel=layout.endswith("lossparallel"),
    )
    names = [name for name, _ in pipe.named_parameters()]
    assert len(names) == len(set(names))


@on_ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_families(group: dist.ProcessGroup, family: str) -> None:
    compare(
        mesh_of(pp=2, tp=2),
        family,
        dtype=torch.float32,
        microbatches=2,
        schedule="Interleaved1F1B",
        sequence_parallel=True,
    )


@pytest.mark.full
@on_ranks(4, env={"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_CHECK_BATCH": "0"})
def test_split_backward_communicates_as_often_as_the_joint_one(group: dist.ProcessGroup) -> None:
    mesh, counts = mesh_of(pp=2, tp=2), {}
    transport = torch_dist(resolve_group(mesh["tp"]), "cpu")
    for sequence_parallel in (False, True):
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"):
            whole = make("llama", num_hidden_layers=8)
            pipe = fused_tp.pipeline(
                whole, mesh, schedule=schedule, microbatches=4, sequence_parallel=sequence_parallel
            )
            batch = batch_of("llama", 16)
            pipe.step(batch)  # the first steps compare models and batches
            before = transport.calls
            pipe.step(batch)
            calls = torch.tensor(transport.calls - before)
            dist.all_reduce(calls)  # V-shaped schedules assign other stages to ranks
            counts[schedule] = int(calls)
        assert len(set(counts.values())) == 1 and min(counts.values()) > 0, counts


@on_ranks(4)
def test_stages_of_torch_with_a_dw_builder(group: dist.ProcessGroup) -> None:
    """Build stages of torch by hand, without `pipeline`."""
    mesh, whole = mesh_of(pp=2, tp=2), Chain().double()
    rank = mesh["pp"].get_local_rank()
    x = seeded(8, 6, 8, dtype=torch.float64, seed=3)
    target = seeded(8, 6, 8, dtype=torch.float64, seed=4)
    (whole(x) - target).square().mean().backward()
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        parts = [copy_of(whole).layers[at] for at in (rank, rank + 2)]
        stages = []
        for at, part in zip((rank, rank + 2), parts, strict=True):
            styles = {"0": fused_tp.FusedColwiseParallel(), "2": fused_tp.FusedRowwiseParallel()}
            parallelize_module(part, mesh["tp"], styles)
            device, pp = torch.device("cpu"), mesh.get_group("pp")
            stages.append(PipelineStage(part, at, 4, device, group=pp, dw_builder=dw_builder(part)))
        schedule = get_schedule_class(name)(stages, 4, loss_fn=lambda y, t: (y - t).square().mean())
        for _ in range(2):
            for part in parts:
                part.zero_grad()
            # In the first step torch runs an extra backward pass; its weight gradients must not count.
            schedule.step(*((x,) if rank == 0 else ()), target=target)
            for at, part in zip((rank, rank + 2), parts, strict=True):
                for (key, p), wanted in zip(part.named_parameters(), whole.layers[at].parameters(), strict=True):
                    assert_near(p.grad, wanted.grad, f"{name}, stage {at}, {key}", EXACT)


class Chain(nn.Module):
    """Layers that pass one hidden state on."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.long
def test_three_kinds_of_parallelism_in_one() -> None:
    for rank in fresh_ranks(8, three_kinds, timeout=300):
        rank.unwrap()


def three_kinds(group: dist.ProcessGroup) -> None:
    mesh = fused_tp.make_mesh("cpu", pp=2, cp=2, tp=2)
    for schedule in ("1F1B", "ZBV"):
        compare(mesh, "llama", schedule=schedule, microbatches=4, sequence_parallel=True, loss_parallel=True)


class Layered(nn.Module):
    """Model of layers, with code that runs in training mode, in backward, or on what all layers keep."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.scale = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.fault == "training" and self.training:
            x = x * (1 + len([layer for layer in self.layers if isinstance(layer, nn.Linear)]))
        elif self.fault == "microbatch" and self.training:
            x = x - x.mean((0, 1))
        elif self.fault == "backward":
            x = x + OtherGradient.apply(x) if len({type(layer) for layer in self.layers}) == 1 else x + x
        return self.head(x)


@on_ranks(4)
def test_a_training_step_is_compared(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(dp=2, pp=2)["pp"]
    for fault, message in (("training", "relative error of the loss"), ("backward", "error of the gradient of")):
        for training in (True, False):
            refuses(
                ValueError,
                message,
                fused_tp.pipeline,
                Layered(fault).train(training),
                mesh,
                microbatches=2,
                loss_fn=mean_loss,
            )
    for fault in ("none", "microbatch"):
        model = Layered(fault)
        parameter = model.layers[0].weight
        parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(3)
        state = torch.get_rng_state()
        pipe = fused_tp.pipeline(model, mesh, microbatches=2, loss_fn=mean_loss)
        assert torch.equal(torch.get_rng_state(), state)
        grads = [p.grad for p in pipe.parameters() if p.grad is not None]
        assert len(grads) == (0 in pipe.stages) and all(bool((grad == 1).all()) for grad in grads)
    batch = {"tokens": make_tokens(4, 8) % 37, "labels": make_tokens(4, 8) % 37}
    fused_tp.pipeline(Layered("none"), mesh, microbatches=2, loss_fn=mean_loss, verify=batch)
    refuses(
        ValueError,
        "of the loss is",
        fused_tp.pipeline,
        Layered("training"),
        mesh,
        microbatches=2,
        loss_fn=mean_loss,
        verify=batch,
    )
    model = Layered("none")
    if group.rank() % 2:
        nn.init.ones_(model.head.weight)
    refuses(RankMismatchError, "different models", fused_tp.pipeline, model, mesh, microbatches=2, loss_fn=mean_loss)
    # torch's own clipping scales each stage by its own norm.
    tokens = make_tokens(4, 8) % 37
    pipe = fused_tp.pipeline(Layered("none"), mesh, microbatches=2, loss_fn=mean_loss)
    optimizer = torch.optim.SGD(list(pipe.parameters()), 1e-3)
    for clip in (lambda: pipe.clip_grad_norm_(1e-3), lambda: torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)):
        pipe.step({"tokens": tokens, "labels": tokens})
        clip()
        optimizer.step()
        optimizer.zero_grad()
    refuses(ValueError, "scaled by different factors", pipe.step, {"tokens": tokens, "labels": tokens})


@on_ranks(4)
def test_changes_by_hand(group: dist.ProcessGroup) -> None:
    """A log line says so if parameters change between steps, but not if an optimizer or loading changes them."""
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8) % 37

    def optimizer_step(pipe: Pipeline) -> None:
        torch.optim.SGD(list(pipe.parameters()), 1e-3).step()

    def load(pipe: Pipeline) -> None:
        pipe.load_state_dict({name: t.clone() for name, t in pipe.state_dict().items()})

    @torch.no_grad()
    def change_by_hand(pipe: Pipeline) -> None:
        for parameter in pipe.parameters():
            parameter -= 1e-3

    @torch.no_grad()
    def step_and_project(pipe: Pipeline) -> None:
        optimizer_step(pipe)
        change_by_hand(pipe)

    @torch.no_grad()
    def sparsify_and_step(pipe: Pipeline) -> None:
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad *= parameter.grad.abs() > parameter.grad.abs().median()
        optimizer_step(pipe)

    silent, logged = (optimizer_step, load), (change_by_hand, step_and_project, sparsify_and_step)
    for change, is_logged in [*((change, False) for change in silent), *((change, True) for change in logged)]:
        pipe = fused_tp.pipeline(Layered("none"), mesh["pp"], microbatches=2, loss_fn=mean_loss)
        with mock.patch("fused_tp.pipelining.pipeline.warn_once") as warn_once:
            pipe.step({"tokens": tokens, "labels": tokens})
            change(pipe)
            pipe.step({"tokens": tokens, "labels": tokens})
        assert [call.args[1] for call in warn_once.call_args_list] == ["changes by hand"] * is_logged


@on_ranks(4)
def test_copies_of_a_tied_parameter_that_differ(group: dist.ProcessGroup) -> None:
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8)
    pipe = fused_tp.pipeline(make("llama", tied=True), mesh["pp"], microbatches=2)
    groups = [{"params": [p], "weight_decay": 0.1 * ("embed" in name)} for name, p in pipe.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-1)
    pipe.step({"input_ids": tokens, "labels": tokens})
    optimizer.step()
    with pytest.raises(ValueError, match="are one parameter in two copies, whose values differ"):
        pipe.step({"input_ids": tokens, "labels": tokens})


@on_ranks(4)
def test_losses_of_the_caller_and_other_ignored_labels(group: dist.ProcessGroup) -> None:
    """A loss function that ignores num_items_in_batch is a mean over microbatches; ignore_index counts targets."""

    def mean_of_targets(logits: Tensor, labels: Tensor, vocab_size: int, **keywords: Any) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    tokens = make_tokens(4, 8)
    for loss_function, ignored in ((mean_of_targets, {}), (None, {"ignore_index": int(tokens[0, 3])})):
        whole = make("llama", num_hidden_layers=4).train()
        if loss_function is not None:
            whole.loss_function = loss_function
        pipe = fused_tp.pipeline(copy_of(whole), mesh_of(dp=2, pp=2)["pp"], microbatches=2)
        batch = {"input_ids": tokens, "labels": tokens, **ignored}
        expected = whole(**batch).loss
        expected.backward()
        assert_near(pipe.step(batch), expected, "loss", TOLERANCE)
        assert_same_gradients(pipe, whole, TOLERANCE)


class ByGlobalNorm(torch.optim.SGD):
    """SGD whose steps have the length of the learning rate, over all parameters."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


@on_ranks(4)
def test_what_a_pipeline_does_not_see_as_a_whole(group: dist.ProcessGroup) -> None:
    """Optimizers that couple parameters are refused; losses that are no means over rows are logged."""
    mesh, tokens = mesh_of(dp=2, pp=2)["pp"], make_tokens(4, 8) % 37
    batch = {"tokens": tokens, "labels": tokens}
    with log_lines() as lines:
        pipe = fused_tp.pipeline(Layered("none"), mesh, microbatches=2, loss_fn=mean_loss)
        for kind in (torch.optim.LBFGS, ByGlobalNorm):
            optimizer = kind(list(pipe.parameters()), lr=0.1)
            pipe.step(batch)
            refuses(
                ValueError, "also from other parameters", optimizer.step, *([lambda: 0] * (kind is torch.optim.LBFGS))
            )
        optimizer = torch.optim.Adafactor(list(pipe.parameters()))
        for _ in range(3):
            pipe.step(batch)
            for parameter in pipe.parameters():  # the caller's own scaling of each gradient
                parameter.grad.sign_()
            optimizer.step()
            optimizer.zero_grad()
    assert all("were changed since its last step, but not by an optimizer" in line for line in lines), lines
    with log_lines() as lines:
        pipe = fused_tp.pipeline(
            Layered("none"),
            mesh,
            microbatches=2,
            loss_fn=lambda output, labels: 100 * mean_loss(output, labels) * len(output),
        )
        pipe.step({**batch, "labels": tokens.masked_fill(torch.arange(4).view(4, 1) == 3, -100)})
    if group.rank() % 2 == 0:
        assert sum("the loss of a batch differs by 1" in line for line in lines) == 1, lines
        assert sum("microbatches have 8 to 16 labels" in line for line in lines) == 1, lines


class NormRate(torch.optim.SGD):
    """SGD whose learning rate is computed from the norm of all gradients, from its third step on."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups if self.num_steps > 2 else ():
            group["lr"] = 0.1 / (1 + float(norm_of_gradients(group["params"])))
        return super().step(closure)


def norm_of_gradients(parameters: Any) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


@on_ranks(4)
def test_hyperparameters_from_the_norm_of_one_ranks_stages(group: dist.ProcessGroup) -> None:
    """Log lines name them, and optimizers of other classes than torch's, but not rates and schedules by layer."""
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8) % 37
    by_hand, by_norm = "changes by hand", "hyperparameter {!r} of {}"

    def train(make_optimizer: Callable[[Pipeline], Any], change: Callable[[Pipeline, Any, int], None]) -> list[str]:
        pipe = fused_tp.pipeline(Layered("none"), mesh["pp"], microbatches=2, loss_fn=mean_loss)
        optimizer = make_optimizer(pipe)
        with (
            mock.patch("fused_tp.pipelining.pipeline.warn_once") as changes,
            mock.patch("fused_tp.pipelining.rank_checks.warn_once") as factors,
        ):
            for step in range(6):
                pipe.step({"tokens": tokens, "labels": tokens})
                change(pipe, optimizer, step)
                optimizer.step()
                optimizer.zero_grad()
        return sorted({call.args[1] for call in [*changes.call_args_list, *factors.call_args_list]})

    def nothing(pipe: Pipeline, optimizer: Any, step: int) -> None:
        pass

    def set_rate(pipe: Pipeline, optimizer: Any, step: int) -> None:
        if step > 2:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(norm_of_gradients(pipe.parameters())))

    def set_decay(pipe: Pipeline, optimizer: Any, step: int) -> None:
        if step > 2:
            norms = [float(p.detach().norm()) for p in pipe.parameters()]
            optimizer.param_groups[0]["weight_decay"] = sum(norms) / 1e3

    def sgd(pipe: Pipeline) -> Any:
        return torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)

    def adamw(pipe: Pipeline) -> Any:
        return torch.optim.AdamW([{"params": [p], "weight_decay": 0.1} for p in pipe.parameters()], 1e-3)

    def rates_by_layer(pipe: Pipeline) -> Any:
        groups = [{"params": [p], "lr": 0.1 * 0.8**index} for index, p in enumerate(pipe.parameters())]
        return torch.optim.SGD(groups, momentum=0.9)

    def anneal(pipe: Pipeline, optimizer: Any, step: int) -> None:
        for parameter_group in optimizer.param_groups:
            rate = parameter_group.setdefault("initial_lr", parameter_group["lr"])
            parameter_group["lr"] = 1e-3 + (rate - 1e-3) / (1 + step)

    assert train(lambda pipe: NormRate(pipe.parameters(), 0.1), nothing) == [by_hand, by_norm.format("lr", "NormRate")]
    assert train(sgd, set_rate) == [by_norm.format("lr", "SGD")]
    assert train(lambda pipe: torch.optim.AdamW(pipe.parameters()), set_decay) == [
        by_norm.format("weight_decay", "AdamW")
    ]
    for make_optimizer in (sgd, adamw, rates_by_layer):
        assert train(make_optimizer, anneal) == []


@on_ranks(4)
def test_optimizer_steps_that_some_ranks_skip(group: dist.ProcessGroup) -> None:
    """The next step of the pipeline raises, but not if all ranks skip, accumulate, or begin later."""
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8) % 37
    batch = {"tokens": tokens, "labels": tokens}
    for zeroes in (True, False):
        pipe = fused_tp.pipeline(Layered("none"), mesh["pp"], microbatches=2, loss_fn=mean_loss)
        optimizer = torch.optim.SGD(pipe.parameters(), 1e-3)
        for step in range(20):
            pipe.step(batch)
            if step % 7 == 4:  # all ranks accumulate
                continue
            if step < 19 or group.rank() % 2:
                optimizer.step()
            if zeroes:
                optimizer.zero_grad()
        refuses(RankMismatchError, "pipeline rank 1 has stepped its optimizer, but pipeline rank 0", pipe.step, batch)
    # The first stage is trained later.
    pipe = fused_tp.pipeline(Layered("none"), mesh["pp"], microbatches=2, loss_fn=mean_loss)
    optimizers = [torch.optim.SGD(pipe.parameters(), 1e-3)]
    for step in range(12):
        pipe.step(batch)
        if step == 6:
            optimizers = [torch.optim.SGD(pipe.parameters(), 1e-3)]
        for optimizer in optimizers if step > 5 or group.rank() % 2 else ():
            optimizer.step()


@on_ranks(4)
def test_copies_of_a_tied_parameter_of_which_one_is_frozen(group: dist.ProcessGroup) -> None:
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8)
    batch = {"input_ids": tokens, "labels": tokens}
    pipe = fused_tp.pipeline(make("llama", tied=True), mesh["pp"], microbatches=2)
    pipe.step(batch)
    for names, is_refused in ((("embed_tokens",), True), (("embed_tokens", "lm_head"), False)):
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
        if is_refused:
            refuses(ValueError, "'lm_head.weight' requires a gradient, but 'model.embed_tokens", pipe.step, batch)
        else:
            pipe.step(batch)


@on_ranks(4)
def test_a_parameter_of_two_names_on_one_rank(group: dist.ProcessGroup) -> None:
    """Optimizers get it once, state dicts have both names."""
    mesh, tokens = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")), make_tokens(4, 8)
    whole = make("llama", tied=True, num_hidden_layers=4)
    pipe = fused_tp.pipeline(copy_of(whole), mesh["pp"], microbatches=2, schedule="ZBV")
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1} for _, p in pipe.named_parameters()])
    names = {"model.embed_tokens.weight", "lm_head.weight"} if group.rank() % 2 == 0 else set()
    assert names & {name for name, _ in pipe.named_parameters()} == set(sorted(names)[1:])
    assert names <= {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
    assert names <= set(pipe.state_dict())
    pipe.step({"input_ids": tokens, "labels": tokens})
    optimizer.step()
    whole(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(whole.parameters(), 0.1).step()
    for name, parameter in pipe.named_parameters():
        assert_near(parameter, whole.get_parameter(name), name, TOLERANCE)


CALLS = {"closure": 0}


class CountingLayer(nn.Linear):
    """Layer that counts its calls in training mode: in an attribute, a list, its class and a closure."""

    calls_of_all = 0

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.calls, self.log = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.log.append(self.calls)
            type(self).calls_of_all += 1
            CALLS["closure"] += 1
        return super().forward(x) + torch.rand(()) * 0


@on_ranks(4)
def test_state_of_the_callers_code_is_as_before(group: dist.ProcessGroup) -> None:
    """Passes that `pipeline` makes itself do not count."""
    mesh, losses = mesh_of(dp=2, pp=2)["pp"], list[float]()

    def counted_loss(output: Tensor, labels: Tensor) -> Tensor:
        losses.append(1.0)
        return mean_loss(output, labels)

    for verify in ("auto", False):
        model = Layered("none")
        model.layers = nn.ModuleList(CountingLayer(16) for _ in range(4))
        torch.manual_seed(3)
        random.seed(3)
        state, host_state = torch.get_rng_state(), random.getstate()
        pipe = fused_tp.pipeline(model, mesh, microbatches=2, loss_fn=counted_loss, layers="layers", verify=verify)
        layers = [m for stage in pipe.stages.values() for m in stage.modules() if isinstance(m, CountingLayer)]
        assert {(layer.calls, len(layer.log)) for layer in layers} == {(0, 0)}
        assert (CountingLayer.calls_of_all, CALLS["closure"], losses) == (0, 0, [])
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == host_state


@on_ranks(4)
def test_packed_documents(group: dist.ProcessGroup) -> None:
    """Positions that restart mark the documents, which differ between microbatches."""
    rows = [[5, 11], [16], [3, 4, 9], [8, 8]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    whole = make("llama", num_hidden_layers=4).double()
    tokens = make_tokens(4, 16)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    expected = whole(**batch, use_cache=False).loss
    expected.backward()
    for mesh in (mesh_of(pp=2, tp=2), mesh_of(pp=2, cp=2)):
        pipe = fused_tp.pipeline(copy_of(whole), mesh, microbatches=4)
        assert_near(pipe.step(batch), expected, "loss", TRANSFORMERS)
        assert_same_gradients(pipe, whole, TRANSFORMERS)


@on_ranks(4)
def test_checkpoint_at_another_number_of_stages(group: dist.ProcessGroup, tmp_path: Path) -> None:
    whole = make("llama", num_hidden_layers=4, tied=True)
    for cut in ({"schedule": "1F1B"}, {"schedule": "Interleaved1F1B"}):
        pipe = fused_tp.pipeline(copy_of(whole), mesh_of(pp=2, tp=2), microbatches=4, **cut)
        dcp.save(pipe.state_dict(), checkpoint_id=tmp_path / cut["schedule"])
        blank = make("llama", num_hidden_layers=4, tied=True)
        with torch.no_grad():
            for parameter in blank.parameters():
                parameter.zero_()
        other = fused_tp.pipeline(blank, mesh_of(pp=4), microbatches=4)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / cut["schedule"])
        other.load_state_dict(state)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@on_ranks(4)
@pytest.mark.parametrize(
    ("family", "sizes", "keywords"),
    [
        ("llama", {"pp": 2, "tp": 2}, {"schedule": "Interleaved1F1B"}),
        pytest.param("llama", {"pp": 2, "dp_shard": 2}, {"schedule": "ZBV"}, marks=pytest.mark.full),
        pytest.param("llama", {"tp": 2, "pp": 2}, {}, marks=pytest.mark.full),
        pytest.param("gemma2", {"pp": 4}, {}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"pp": 2, "tp": 2}, {}, marks=pytest.mark.full),
    ],
)
def test_save_pretrained_writes_the_whole_model(
    group: dist.ProcessGroup, tmp_path: Path, family: str, sizes: dict[str, int], keywords: dict[str, Any]
) -> None:
    whole = make(family, num_hidden_layers=4, tied=family == "llama")
    pipe = fused_tp.pipeline(copy_of(whole), mesh_of(**sizes), microbatches=4, **keywords)
    if "dp_shard" in sizes:
        for stage in pipe.stages.values():
            fully_shard(stage, mesh=mesh_of(**sizes)["dp_shard"], reshard_after_forward=False)
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    dist.barrier()
    loaded = type(whole).from_pretrained(tmp_path)
    expected = whole.state_dict()
    assert loaded.state_dict().keys() == expected.keys() and len([*tmp_path.glob("*.safetensors")]) > 1
    for name, t in loaded.state_dict().items():
        assert torch.equal(t, expected[name]), name
    assert type(whole.config).from_pretrained(tmp_path).architectures == [type(whole).__name__]


@on_ranks(4)
def test_save_pretrained_of_a_weight_by_columns(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """gloo sends only contiguous tensors."""
    whole = make("llama", num_hidden_layers=4)
    layer = whole.model.layers[3].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    pipe = fused_tp.pipeline(copy_of(whole), mesh_of(pp=4), microbatches=4)
    assert all(p.is_contiguous() for p in pipe.parameters()) == (dist.get_rank() < 3)
    pipe.save_pretrained(tmp_path)
    dist.barrier()
    for name, t in type(whole).from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(t, whole.state_dict()[name]), name


def failing_in_save_pretrained(group: dist.ProcessGroup, path: Path) -> str:
    """Error of this rank if rank 1 fails while the weights are on their way to rank 0."""
    pipe = fused_tp.pipeline(make("llama", num_hidden_layers=4), mesh_of(pp=4), microbatches=4)
    transport = torch_dist(resolve_group(pipe._group), "cpu")
    sends = transport.all_to_all
    calls = itertools.count()

    def send(*arguments: Any) -> Any:
        if group.rank() == 1 and next(calls) == 3:
            raise MemoryError("a test")
        return sends(*arguments)

    with mock.patch.object(transport, "all_to_all", send):
        begun = time.monotonic()
        error = error_of(pipe.save_pretrained, path)
        assert time.monotonic() - begun < 30
        return f"{type(error).__name__}: {error}"


def test_save_pretrained_with_a_rank_that_fails(tmp_path: Path) -> None:
    """The other ranks raise at once, with its error."""
    outcomes = fresh_ranks(4, failing_in_save_pretrained, tmp_path)
    errors = [outcome.unwrap() for outcome in outcomes]
    assert errors[1] == "MemoryError: a test"
    assert all("save_pretrained" in error and "a test" in error for error in (errors[0], errors[2], errors[3])), errors


@on_ranks(4)
def test_save_pretrained_refuses_a_plain_model(group: dist.ProcessGroup, tmp_path: Path) -> None:
    pipe = fused_tp.pipeline(make("plain", num_hidden_layers=4), mesh_of(pp=4), microbatches=4, loss_fn=mean_loss)
    assert "is not a transformers model" in str(error_of(pipe.save_pretrained, tmp_path))


@on_ranks(4)
def test_layers_are_shared_out_by_their_costs(group: dist.ProcessGroup) -> None:
    whole = make("llama", num_hidden_layers=6, vocab_size=2048)
    pipe = fused_tp.pipeline(copy_of(whole), mesh_of(pp=2, tp=2), microbatches=2)
    assert len(pipe.parts[0]) > len(pipe.parts[1])  # the second also has the output layer
    pipe = fused_tp.pipeline(copy_of(whole), mesh_of(pp=2, tp=2), microbatches=2, costs=[9, 1, 1, 1, 1, 1])
    assert [len(part) for part in pipe.parts] == [1, 5]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_sharing_out_is_cheaper(stages: int) -> None:
    random.seed(stages)
    for _ in range(20):
        costs = [random.choice([0, 1, 2, 5, 7.5]) for _ in range(7)]
        found = share_out(costs, stages)
        assert [at for part in found for at in part] == list(range(7)) and all(found)
        cuts = itertools.combinations(range(1, 7), stages - 1)
        options = ([0, *cut, 7] for cut in cuts)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in options)
        assert max(sum(costs[at] for at in part) for part in found) == best


class Odd(nn.Module):
    """A model that cannot be split into stages, for the reason in `what`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.embed, self.layers, self.head = nn.Embedding(11, 8), Chain().layers, nn.Linear(8, 11)
        if what == "parameter":
            self.scale = nn.Parameter(torch.ones(8))
        if what == "second list":
            self.others = nn.ModuleList([nn.Linear(8, 8)])
        if what == "between":
            self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = x = self.embed(tokens)
        if self.what == "parameter":
            x = x * self.scale
        layers = list(self.layers)
        if self.what == "order":
            layers.reverse()
        for layer in layers[:-1] if self.what == "left out" else layers:
            if self.what == "between" and layer is self.layers[2]:
                x = self.norm(x)
            x = layer(x) + embedded if self.what == "residual" else layer(x)
        if self.what == "embedding behind":
            x = x + embedded
        return self.head(x)


@on_ranks(4)
def test_what_cannot_be_cut_is_refused_before_anything_is_changed(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(pp=2, tp=2)
    reasons = {
        "parameter": "'Odd' has parameters (scale) but is not called as a module",
        "second list": "has 2 lists of layers ('layers', 'others')",
        "between": "runs 'norm', which has parameters, between layers",
        "order": "runs layer 3 of 'layers' where layer 0 was expected",
        "left out": "Odd runs 'head', which has parameters, between layers",
        "residual": "must be the hidden state that the previous layer returned",
        "embedding behind": "uses the output of 'embed' after its last layer, which the last stage does not have",
    }
    for what, says in reasons.items():
        model = Odd(what)
        before = [name for name, _ in model.named_modules()]
        refused(ValueError, says, model, mesh, microbatches=4, loss_fn=mean_loss)
        assert [name for name, _ in model.named_modules()] == before and model.training
    model = make("llama", num_hidden_layers=4)
    for says, keywords in {
        "must be one of GPipe": {"schedule": "2F2B", "microbatches": 4},
        "at least one for each of the 2": {"microbatches": 1},
        "needs at least 4, two for each": {"schedule": "DualPipeV", "microbatches": 3},
        "needs a multiple of 2, such as 4": {"schedule": "Interleaved1F1B", "microbatches": 5},
        "has 1 stage on each rank": {"virtual_stages": 2, "microbatches": 4},
        "needs two or more on each rank": {"schedule": "interleaved", "virtual_stages": 1, "microbatches": 4},
        "costs has 3 numbers for the 4 layers": {"costs": [1, 1, 1], "microbatches": 4},
        "mesh must have the dim pp_dim='stage'": {"pp_dim": "stage", "microbatches": 4},
        "microbatches is 0; it must be at least 1": {"microbatches": 0},
        "4 layers cannot be divided over 6": {"schedule": "interleaved", "virtual_stages": 3, "microbatches": 4},
        "no nn.ModuleList 'blocks'": {"layers": "blocks", "microbatches": 4},
    }.items():
        refused(ValueError, says, model, mesh, **keywords)
    for asked in ({"sequence_parallel": True}, {"loss_parallel": True}, {"ulysses_size": 2}, {"ep_dim": "tp"}):
        refused(ValueError, "needs ranks along", model, mesh_of(pp=4), microbatches=4, **asked)
    refused(TypeError, "has no keyword 'sequence'", model, mesh, microbatches=4, sequence=True)
    model.config.output_router_logits = True
    refused(ValueError, "output_router_logits", model, mesh, microbatches=4)
    refused(ValueError, "has no argument labels. Pass loss_fn", Odd(""), mesh, microbatches=4)
    pipe = fused_tp.pipeline(make("llama", num_hidden_layers=4), mesh_of(pp=2, cp=2), microbatches=4)
    tokens = make_tokens(8, 16)
    for says, batch in {
        "batch has no 'labels'": {"input_ids": tokens},
        "batch has 6 rows, but 4 microbatches": {"input_ids": tokens[:6], "labels": tokens[:6]},
        "needs a multiple of 4. Pad the rows": {"input_ids": tokens[:, :14], "labels": tokens[:, :14]},
        "needs 8 rows": {"input_ids": tokens, "labels": tokens, "cu_seq_lens_q": torch.tensor([0, 4, 16])},
    }.items():
        error = error_of(pipe.step, batch)
        assert isinstance(error, ValueError) and says in str(error), (says, error)
    pipe.step({"input_ids": tokens, "labels": tokens})


def refused(kind: type[Exception], says: str, model: nn.Module, mesh: DeviceMesh, **keywords: Any) -> None:
    error = error_of(fused_tp.pipeline, model, mesh, **keywords)
    assert isinstance(error, kind) and says in str(error), (says, error)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad.clone(), None


class SleepyLayer(nn.Module):
    """Layer that takes `seconds` for each of forward, input gradient and weight gradient."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return _Sleep.apply(x, self.seconds) + _Sleep.apply(self.weight, self.seconds)


class Sleepy(nn.Module):
    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)  # ranks build the same model
        self.embed = nn.Embedding(3, 4)
        self.layers = nn.ModuleList(SleepyLayer(seconds) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def simulated(spans: list[Span], stages: int, seconds: Callable[[Span], float]) -> float:
    """Duration of the computations, in their order on each rank, if each begins as soon as it can."""
    done: dict[tuple[str, int, int], float] = {}
    queues = [sorted((s for s in spans if s.rank == rank), key=lambda s: s.start) for rank in range(4)]
    clocks = [0.0] * 4
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, number = queue[0].kind, queue[0].stage, queue[0].microbatch
                needs = {
                    "forward": [("forward", stage - 1, number)] if stage else [],
                    "backward": [("backward", stage + 1, number)] if stage + 1 < stages else [],
                    "weights": [("backward", stage, number)],
                }[kind]
                if not all(need in done for need in needs):
                    break
                begins = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[kind, stage, number] = begins + seconds(queue.pop(0))
    return max(clocks)


@pytest.mark.long  # measures, so it runs alone
@on_ranks(4)
def test_a_step_on_time_and_its_picture(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Layers sleep instead of computing: a step takes as long as a simulation of its schedule."""
    microbatches, of_rank, bubbles = 8, 0.03, {}
    batch = {"tokens": torch.zeros(8, 2, dtype=torch.long), "labels": torch.zeros(8, 2, 4)}
    for schedule, stages in (("1F1B", 4), ("ZBV", 8)):
        seconds = of_rank * 4 / stages
        keywords = {"schedule": schedule, "microbatches": microbatches, "costs": [1] * stages}
        pipe = fused_tp.pipeline(
            Sleepy(stages, seconds), mesh_of(pp=4), loss_fn=lambda y, t: (y - t).mean(), **keywords
        )
        pipe.step(batch)
        dist.barrier()
        with pipe.recording() as own:
            pipe.step(batch)
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, own)
        spans = [span for one in gathered for span in one]
        took = max(s.stop for s in spans) - min(s.start for s in spans)
        # Sleeping takes longer than asked: simulate with the seconds that each computation took.
        wanted = simulated(spans, stages, lambda span: span.stop - span.start)
        assert wanted <= took < 1.05 * wanted, (schedule, took, wanted)
        bubbles[schedule] = bubble(spans)
        if schedule == "1F1B":  # the bubble is the time of three microbatches
            assert bubbles[schedule] == pytest.approx(3 / (microbatches + 3), rel=0.05)
        path = tmp_path / f"{schedule}.{dist.get_rank()}.png"
        draw(spans, path)
        assert path.stat().st_size > 10_000
    assert bubbles["ZBV"] < 0.6 * bubbles["1F1B"], bubbles


@pytest.mark.full
@on_ranks(4)
def test_models_with_other_losses_layers_and_outputs(group: dist.ProcessGroup) -> None:
    """Losses without a count (Bart), layers with several outputs (Bamba), code that reads weights of modules on other
    stages (Llama 4, Mamba), checkpointing, and batches with the padding mask before the tokens."""
    mesh = mesh_of(pp=2, tp=2)
    for kind in ("bart", "bamba", "llama4_text", "mamba2", "x"):
        inside = mesh_of(pp=2, dp=2) if kind == "bart" else mesh  # Bart has no plan
        whole = make_model(kind) if kind == "bart" else make("llama" if kind == "x" else kind)
        tokens = make_tokens(8, 16)
        mask = torch.ones_like(tokens)
        mask[0, 12:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        batch = {"attention_mask": mask, "input_ids": tokens, "labels": labels}
        if kind != "x":
            batch = {"input_ids": tokens, "labels": tokens if kind == "bart" else labels}
        expected = whole.train()(**batch, use_cache=False).loss
        expected.backward()
        copied = copy_of(whole)
        if kind == "x":
            copied.gradient_checkpointing_enable()
        pipe = fused_tp.pipeline(copied, inside, microbatches=4)
        assert_near(pipe.step(batch), expected, f"loss of {kind}", TOLERANCE)
        for name, parameter in pipe.named_parameters():
            wanted = whole.get_parameter(name).grad
            assert (wanted is None) == (parameter.grad is None), name
            if wanted is None:
                continue
            found = full(parameter.grad)
            assert_near(found.reshape(wanted.shape), wanted, f"{kind}: {name}", TOLERANCE)
        if kind == "bart":
            error = error_of(pipe.step, {"input_ids": tokens, "labels": labels})
            assert "equal numbers of targets, got 28 in the first and 32 in microbatch 1" in str(error)


class Counted(Chain):
    """Model that counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


@on_ranks(4)
def test_what_goes_wrong_is_said_on_all_ranks_and_costs_nothing(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(pp=2, tp=2)
    counted = Counted()
    pipe = fused_tp.pipeline(
        counted, mesh_of(pp=4), microbatches=4, loss_fn=lambda y, t: y.mean(), example={"x": torch.zeros(1, 2, 8)}
    )
    assert not pipe.stages[dist.get_rank()].model.passes
    whole = make("llama", num_hidden_layers=4, tied=True)
    pipe = fused_tp.pipeline(copy_of(whole), mesh, microbatches=4)
    batch = batch_of("llama", 16)
    pipe.step(batch)
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    with torch.no_grad():
        assert isinstance(error_of(pipe.step, batch), RuntimeError)
    after = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert all(torch.equal(full(a), full(b)) for a, b in zip(before, after, strict=True))
    other = {name: t.roll(mesh["pp"].get_local_rank(), 0) for name, t in batch.items()}
    error = error_of(pipe.eval, other)
    assert isinstance(error, fused_tp.RankMismatchError) and "pp" in str(error), error
    whole(**batch).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    found = pipe.clip_grad_norm_(0.1)
    assert_near(found.float(), norm, "norm", TOLERANCE)
    assert_same_gradients(pipe, whole, TOLERANCE)
    for parameter in pipe.parameters():
        parameter.main_grad = torch.zeros(())
    assert "has a main_grad, but the first stage and the last share" in str(error_of(pipe.step, batch))
    one = fused_tp.pipeline(
        copy_of(whole), DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("pp", "cp")), microbatches=2
    )
    one.step(batch)
    state = {name: torch.zeros_like(t) for name, t in whole.state_dict().items()}
    pipe.load_state_dict(state)
    assert not any(full(p).any() for p in pipe.parameters())


@pytest.mark.full
@on_ranks(4)
def test_fsdp_around_stages(group: dist.ProcessGroup) -> None:
    mesh = fused_tp.make_mesh("cpu", pp=2, dp_shard=2)
    tokens = make_tokens(8, 16)
    own = tokens.chunk(2)[mesh["dp_shard"].get_local_rank()]
    for schedule, reshard in (("1F1B", True), ("ZBV", False), ("ZBV", True)):
        whole = make("llama", num_hidden_layers=4)
        pipe = fused_tp.pipeline(copy_of(whole), mesh, microbatches=4, schedule=schedule)
        for stage in pipe.stages.values():
            for layer in [one for one in stage.model.model.layers if any(True for _ in one.parameters())]:
                fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh), reshard_after_forward=reshard)
            fully_shard(stage, mesh=fused_tp.fsdp_mesh(mesh), reshard_after_forward=reshard)
        if schedule == "ZBV" and reshard:
            assert "reshard_after_forward=False" in str(error_of(pipe.step, {"input_ids": own, "labels": own}))
            continue
        pipe.step({"input_ids": own, "labels": own})
        whole(input_ids=tokens, labels=tokens).loss.backward()
        assert_same_gradients(pipe, whole, TOLERANCE)


@on_ranks(4)
def test_experts_dealt_out_over_context_parallel_ranks_and_plans_of_some_layers(group: dist.ProcessGroup) -> None:
    """Gradients of experts that only one rank holds are not summed; a stage may lack layers that the plan names."""
    for keywords, mesh in (
        ({"ep_dim": "cp"}, mesh_of(pp=2, cp=2)),
        ({"plan": {f"model.layers.0.self_attn.{x}_proj": "colwise" for x in "qkv"}}, mesh_of(pp=2, tp=2)),
    ):
        dealt = "ep_dim" in keywords
        whole = make("qwen3_moe" if dealt else "llama", num_hidden_layers=2)
        if not dealt:
            keywords["plan"] |= {"model.layers.0.self_attn.o_proj": "rowwise"}
        batch = batch_of("llama", 16)
        whole(**batch, use_cache=False).loss.backward()
        pipe = fused_tp.pipeline(copy_of(whole), mesh, microbatches=4, **keywords)
        pipe.step(batch)
        assert_same_gradients(pipe, whole, TOLERANCE)


@on_ranks(4)
def test_models_on_the_meta_device(group: dist.ProcessGroup) -> None:
    """No rank ever holds the whole model: each allocates and loads its own parts only."""
    tokens = make_tokens(4, 16)
    for family, sizes in (
        ("llama", {"pp": 2, "tp": 2}),
        ("gemma2", {"pp": 2, "cp": 2}),
        ("qwen3_moe", {"pp": 4}),
        ("plain", {"pp": 2, "tp": 2}),
    ):
        layers = {"num_hidden_layers": 4} if family == "qwen3_moe" else {}
        whole = make(family, tied=family == "llama", **layers)
        with torch.device("meta"):
            empty = make(family, tied=family == "llama", **layers)
        pipe = fused_tp.pipeline(empty, mesh_of(**sizes), microbatches=4)
        held = sum(full(p).numel() for p in pipe.parameters())
        assert held < 0.8 * sum(p.numel() for p in whole.parameters()) and not any(p.is_meta for p in pipe.parameters())
        pipe.load_state_dict(whole.state_dict())
        loss = whole(tokens, labels=tokens)
        loss = loss.loss if hasattr(loss, "loss") else loss[0]
        assert_near(pipe.step({"input_ids" if family != "plain" else "tokens": tokens, "labels": tokens}), loss, family)
        loss.backward()
        assert_same_gradients(pipe, whole, TOLERANCE)
