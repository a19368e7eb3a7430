"""Comparisons after the first steps: what changes is compared again, and what a comparison has written is restored."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import make_tokens, mesh_of
from tests.integrations.test_sharding_check import PLAN, Block, log_lines
from tests.workers import on_ranks


def add_nothing(x: Tensor) -> Tensor:
    return x


def subtract_mean(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


MIXERS: dict[str, Callable[[Tensor], Tensor]] = {"mix": add_nothing}
IS_MIXING: ContextVar[bool] = ContextVar("IS_MIXING", default=False)


class Changing(Block):
    """Block that mixes tokens once `mix` is not 0, an observer is set, or something else says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.zeros(()))
        self.observer: Any = None
        self.kind = "causal"
        self.flags = [False] * 10

    def forward(self, tokens: Tensor, positions: Tensor | None = None, centered: bool = False) -> Tensor:
        output = super().forward(tokens, positions)
        is_mixing = centered or self.observer is not None or self.kind != "causal" or self.flags[7] or IS_MIXING.get()
        is_mixing = is_mixing or "TEST_IS_MIXING" in os.environ
        return MIXERS["mix"](output) - (self.mix + is_mixing) * output.mean(1, keepdim=True)


class Observer:
    pass


class CenteredLinear(TorchFunctionMode):
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = fn(*args, **(kwargs or {}))
        return output - output.mean(1, keepdim=True) if fn is F.silu else output


def replace_silu(model: Changing, stack: ExitStack) -> None:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(F, "silu", lambda x: x - x.mean(1, keepdim=True))


def add_global_hook(model: Changing, stack: ExitStack) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output - output.mean(1, keepdim=True) if isinstance(module, nn.Embedding) else None

    stack.callback(nn.modules.module.register_module_forward_hook(hook).remove)


def set_context_variable(model: Changing, stack: ExitStack) -> None:
    stack.callback(IS_MIXING.reset, IS_MIXING.set(True))


def set_environment_variable(model: Changing, stack: ExitStack) -> None:
    stack.enter_context(pytest.MonkeyPatch.context()).setenv("TEST_IS_MIXING", "1")


def replace_function_in_dict(model: Changing, stack: ExitStack) -> None:
    stack.enter_context(pytest.MonkeyPatch.context()).setitem(MIXERS, "mix", subtract_mean)


CHANGES: dict[str, Callable[[Changing, ExitStack], Any]] = {
    "number in a buffer": lambda model, stack: model.mix.fill_(0.5),
    "object in an attribute": lambda model, stack: setattr(model, "observer", Observer()),
    "text": lambda model, stack: setattr(model, "kind", "full"),
    "entry of a list": lambda model, stack: model.flags.__setitem__(7, True),
    "function in a dict": replace_function_in_dict,
    "context variable": set_context_variable,
    "environment variable": set_environment_variable,
    "function mode": lambda model, stack: stack.enter_context(CenteredLinear()),
    "function of torch": replace_silu,
    "global hook": add_global_hook,
}


@on_ranks(2)
@pytest.mark.parametrize("change", [*CHANGES, "argument"])
@pytest.mark.parametrize("is_training", [True, False])
def test_changes_after_the_first_calls_are_compared(group: dist.ProcessGroup, change: str, is_training: bool) -> None:
    model, tokens = parallelize(Changing(), mesh_of(group, 2, 1)["cp"], plan=PLAN), make_tokens(2, 8) % 37
    for _ in range(3):
        model(tokens).square().mean().backward()
    model.train(is_training)
    with ExitStack() as stack, torch.set_grad_enabled(is_training):
        model(tokens)
        if change in CHANGES:
            CHANGES[change](model, stack)
        with pytest.raises(ValueError, match="does not match the unsharded model"):
            model(tokens, centered=change == "argument")


@on_ranks(2)
def test_changes_on_one_rank_are_compared_on_all(group: dist.ProcessGroup) -> None:
    """Ranks compare together, although only one of them has forgotten the shapes of outputs."""
    model, tokens = parallelize(Changing(), mesh_of(group, 2, 1)["cp"], plan=PLAN), make_tokens(2, 8) % 37
    for call in range(6):
        model.note = "first" if call > 3 and group.rank() == 0 else None
        model(tokens).square().mean().backward()
        with torch.no_grad():
            model(tokens)


@on_ranks(2)
def test_multi_grad_hooks(group: dist.ProcessGroup) -> None:
    model, tokens, norms = parallelize(Block(), mesh_of(group, 2, 1)["cp"], plan=PLAN), make_tokens(2, 8) % 37, []
    parameters = [*model.parameters()]
    register: Any = torch.autograd.graph.register_multi_grad_hook
    register(parameters, lambda grads: norms.append(sum(float(g.square().sum()) for g in grads if g is not None)))
    for call in range(3):
        model.zero_grad()
        model(tokens).square().mean().backward()
        expected = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
        assert len(norms) == call + 1 and norms[-1] == pytest.approx(expected)


@on_ranks(2)
def test_longer_sequences_in_evaluation_are_compared(group: dist.ProcessGroup) -> None:
    model = Block(tokens=lambda x: x.mean(1, keepdim=True) * (x.shape[1] > 8))
    parallelize(model, mesh_of(group, 2, 1)["cp"], plan=PLAN)
    model(make_tokens(2, 8) % 37).sum().backward()
    with torch.no_grad(), pytest.raises(ValueError, match="does not match the unsharded model"):
        model(make_tokens(2, 48) % 37)


# -- what is restored --------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("count",)


def count_in_attribute(default: list[int] = []) -> None:  # noqa: B006
    count_in_attribute.calls = getattr(count_in_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    default.append(1)


class Stateful(Block):
    """Block whose output depends on state of every kind that a comparison restores."""

    calls = 0
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        Stateful.calls, Stateful.counts = 0, Counter()
        count_in_attribute.calls = 0  # type: ignore[attr-defined]
        count_in_attribute.__defaults__[0].clear()  # type: ignore[index]
        random.seed(1)
        np.random.seed(1)
        self.history: deque[int] = deque(maxlen=5)
        self.generator, self.numpy_generator = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.own_random, self.array, self.slotted = random.Random(1), np.zeros(2), Slotted()
        self.slotted.count = 0
        self.weak_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.namespace = SimpleNamespace(count=0)

    @cache  # noqa: B019  # the test is of caches like it
    def draw_once(self) -> float:
        return self.own_random.random()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        Stateful.calls += 1
        Stateful.counts.update(["forward"])
        count_in_attribute()
        self.history.append(Stateful.calls)
        self.array[0] += 1
        self.slotted.count += 1
        self.weak_counts[self.up] = self.weak_counts.get(self.up, 0) + 1
        self.namespace.count += 1
        drawn = (
            self.draw_once(),
            random.random(),
            np.random.rand(),
            self.own_random.random(),
            self.numpy_generator.random(),
        )
        drawn_sum = sum(drawn) + float(torch.rand((), generator=self.generator))
        return super().forward(tokens, positions) * (1 + 0.01 * drawn_sum * len(self.history) * self.counts["forward"])


@on_ranks(2)
def test_state_of_the_callers_code_is_restored(group: dist.ProcessGroup) -> None:
    tokens, results = make_tokens(2, 8) % 37, []
    for verify in ("auto", False):
        model = parallelize(Stateful(), mesh_of(group, 1, 2)["tp"], plan=PLAN, verify=verify)
        losses = []
        for step in range(5):
            loss = model(tokens).square().mean()
            loss.backward()
            losses.append(float(loss))
            with torch.set_grad_enabled(step % 2 == 0):
                model(tokens)
        counts = (*model.weak_counts.values(), model.namespace.count, model.slotted.count, model.array[0])
        state = (model.calls, model.counts["forward"], [*model.history], *counts)
        defaults: Any = count_in_attribute.__defaults__
        attributes: Any = vars(count_in_attribute)
        results.append((losses, state, len(defaults[0]), attributes["calls"], random.random(), np.random.rand()))
    assert results[0] == results[1]
    assert results[0][1][:2] == (10, 10)


class Recomputed(torch.autograd.Function):
    """Run a module without a graph, and once more in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)
        return x.grad, None


@on_ranks(2)
def test_gradients_that_a_backward_function_accumulates(group: dist.ProcessGroup) -> None:
    tokens, gradients = make_tokens(2, 8) % 37, []
    for is_parallel in (False, True):
        model = Block()
        model.tokens = lambda x, model=model: Recomputed.apply(x, nn.Sequential(model.up, nn.SiLU(), model.down))
        if is_parallel:
            parallelize(model, mesh_of(group, 1, 2)["tp"], plan=PLAN)
        model(tokens).square().mean().backward()
        grads: Any = {name: p.grad for name, p in model.named_parameters()}
        gradients.append({name: grad.full_tensor() if is_parallel else grad for name, grad in grads.items()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, msg=name)


@on_ranks(2)
def test_compressed_saved_tensors_are_compared(group: dist.ProcessGroup) -> None:
    model, tokens = parallelize(Block(), mesh_of(group, 1, 2)["tp"], plan=PLAN), make_tokens(2, 8) % 37

    def pack(t: Tensor) -> Tensor:
        return t if t.ndim < 3 or not t.is_floating_point() else (t / t.abs().max()).round() * t.abs().max()

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(ValueError, match=r"the gradient of .* does not match the unsharded model"),
    ):
        model(tokens)


class Returning(Block):
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        return super().forward(tokens, positions), float(self.up(self.embed(tokens)).square().sum())


@on_ranks(2)
def test_numbers_that_forward_returns_are_compared(group: dist.ProcessGroup) -> None:
    model = parallelize(Returning(), mesh_of(group, 1, 2)["tp"], plan=PLAN)
    with log_lines() as lines:
        model(make_tokens(2, 8) % 37)
    assert any("the number 0 that it returns" in line for line in lines) == (group.rank() == 0), lines


@on_ranks(2)
def test_assigned_data(group: dist.ProcessGroup) -> None:
    """Programs that assign to `data` train like one process."""
    tokens, states = make_tokens(2, 8) % 37, []
    for is_parallel in (False, True):
        model = Block()
        if is_parallel:
            parallelize(model, mesh_of(group, 1, 2)["tp"], plan=PLAN)
        for _ in range(3):
            model(tokens).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data = p.grad.data.clamp(-1e-3, 1e-3)
                    p.data = p.data - 0.5 * p.grad.data
        states.append(gather_state_dict(model) if is_parallel else model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, msg=name)


@on_ranks(2)
def test_another_backward_pass_over_context_parallel_ranks(group: dist.ProcessGroup) -> None:
    model, tokens = parallelize(Block(), mesh_of(group, 2, 1)["cp"], plan=PLAN), make_tokens(2, 8) % 37
    with log_lines() as lines:
        loss = model(tokens).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert not lines, lines
        model.zero_grad()
        model(tokens).square().mean().backward()
        model.embed.weight.square().sum().backward()
    assert any("adds to gradients, which are summed" in line for line in lines) == (group.rank() == 0), lines
