"""Forward passes that leave a model, its callers' code and random states as they were, but for what hooks print."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fused_tp.integrations.batch_check import suspended
from fused_tp.integrations.forward_shard import version_of
from fused_tp.integrations.model_check import code_of, is_of_library
from fused_tp.integrations.uncut import TABLES

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)  # of these very types: others may do more than hold
_COMPILED = "_compiled_call_impl"  # what `module.compile()` sets
_CODE = (FunctionType, MethodType, ModuleType, type, partial)


class Mode(Enum):
    """How a model runs to be compared, from the one that tells most to the one that always can: ranks with a part of
    the tokens draw other random numbers than one process with all."""

    AS_IT_IS = auto()
    WITHOUT_DROPOUT = auto()
    EVAL = auto()


@contextmanager
def undisturbed(
    models: Sequence[nn.Module], mode: Mode, *, gradients: bool = False, random_states: Sequence[torch.Tensor] = ()
) -> Iterator[Callable[[], bool]]:
    """A context for forward passes that leaves `models` as they were.

    Yields a function that tells, also afterwards, whether random numbers were drawn.

    Args:
        models: a cut one's layers of ours keep their attributes, about which they agree with other ranks'.
        gradients: with them.
        random_states: to begin with, of `random_states_now`; else always the same ones.
    """
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    held = [
        (attributes, {name: dict(attributes[name]) for name in TABLES if name in attributes})
        for attributes in (dict(vars(module)) for module in modules)
    ]
    buffers = [(b, b.detach().clone(), version_of(b)) for model in models for b in model.buffers() if not b.is_meta]
    try:
        with (
            _kept(_callers_state(modules)),
            torch.random.fork_rng(_devices()),
            torch.set_grad_enabled(gradients),
            suspended(),
            _saved_plainly(),
        ):
            torch.manual_seed(0)
            for device, state in zip((None, *_devices()), random_states, strict=False):
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
            states = random_states_now()
            for module in modules:
                module.training &= mode is not Mode.EVAL
                if _COMPILED in vars(module):
                    vars(module)[_COMPILED] = None  # it would be compiled anew, for other parameters
                if mode is Mode.WITHOUT_DROPOUT:
                    vars(module).update(dict.fromkeys(_chances(module), 0.0))
            drew = False
            try:
                yield lambda: drew
            finally:
                drew = not all(map(torch.equal, states, random_states_now()))
    finally:
        for module, was_training, (attributes, tables) in zip(modules, modes, held, strict=True):
            if type(module).__module__.startswith("fused_tp."):
                module.training = was_training
                vars(module).update({n: attributes[n] for n in (*_chances(module), _COMPILED) if n in attributes})
                continue
            for name in set(vars(module)) - set(attributes):
                del vars(module)[name]
            vars(module).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)
        with torch.no_grad():
            for buffer, value, version in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)


@contextmanager
def _saved_plainly() -> Iterator[None]:
    """A context in which what backward needs is kept as it is: a caller's checkpoint around it counts tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    # Detached: an output that a node keeps of itself would never be freed.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
        yield


def _chances(module: nn.Module) -> list[str]:
    """Attributes of `module` that are chances of dropout."""
    own = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ()
    return [n for n, v in vars(module).items() if isinstance(v, float) and (n in own or "drop" in n)]


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def random_states_now() -> list[torch.Tensor]:
    """Of the CPU and of the current GPU, if there is one."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _devices())]


# -- what callers' hooks and forwards write to -------------------------------------------------------------------------


def _callers_state(modules: Sequence[nn.Module]) -> list[Any]:
    """Containers, variables of closures and dicts of globals and objects, to which code of the callers may write."""
    found: dict[object, Any] = {}

    def add(value: Any, depth: int) -> None:
        if id(value) in found or depth > 3:
            return
        if type(value) in _CONTAINERS:
            found[id(value)] = value
        elif isinstance(value, partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                add(one, depth + 1)
        elif isinstance(value, MethodType):
            add(value.__func__, depth + 1)
            if not isinstance(value.__self__, nn.Module):
                add(vars(value.__self__) if hasattr(value.__self__, "__dict__") else None, depth + 1)
        elif isinstance(value, FunctionType) and not is_of_library(value):
            for cell in value.__closure__ or ():
                found[id(cell)] = cell
                add(_contents(cell), depth + 1)
            for name in value.__code__.co_names:
                known = value.__globals__.get(name)
                if type(known) in _CONTAINERS:
                    add(known, depth + 1)
                elif isinstance(known, (int, float)):
                    found[id(value), name] = value.__globals__, name, known
        elif not isinstance(value, (nn.Module, *_CODE)) and callable(value) and hasattr(value, "__dict__"):
            add(vars(value), depth + 1)

    for module in modules:
        for value in code_of(module).values():
            add(value, 0)
        for name, value in vars(module).items():
            if name not in TABLES:
                add(value, 3)
    return [*found.values()]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@contextmanager
def _kept(state: Sequence[Any]) -> Iterator[None]:
    """A context at whose end these hold what they held."""
    held = [_contents(one) if isinstance(one, CellType) else copy.copy(one) for one in state]
    try:
        yield
    finally:
        for one, value in zip(state, held, strict=True):
            if isinstance(one, CellType):
                if _contents(one) is not value:
                    one.cell_contents = value
            elif isinstance(one, tuple):
                names, name, number = one
                names[name] = number
            elif isinstance(one, list):
                one[:] = value
            else:
                one.clear()
                one.update(value)
