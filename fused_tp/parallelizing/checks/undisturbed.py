"""Context for forward passes that leave a model, random states and variables of the callers' code unchanged.

On exit it restores attributes, hooks and buffers of modules. It also restores variables that the callers' code
(forwards, hooks, helpers) can reach: containers, closures, globals that it assigns, and objects of the callers'
classes. Output to files and terminals cannot be undone.
"""

from __future__ import annotations

import copy
import dis
import sys
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fused_tp.parallelizing.checks.batch_check import suspended
from fused_tp.parallelizing.checks.model_check import code_of, is_of_library
from fused_tp.parallelizing.checks.unsharded import TABLES, ModuleState
from fused_tp.parallelizing.forward_shard import version_of

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)  # exact types only: iterating a subclass may run user code
_COMPILED = "_compiled_call_impl"  # attribute set by `module.compile()`
_NOT_FOLLOWED = (nn.Module, torch.Tensor, ModuleType, type, str, bytes, int, float, complex, type(None))
_MAX_DEPTH, _MAX_ENTRIES = 5, 1000  # limits of the search: nesting of containers, and entries of one container
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Mode(Enum):
    """Modes of a model in a comparison, in the order in which they are tried.

    A mode is rejected if forward draws random numbers in it: a rank with a shard of the tokens draws different numbers
    than a process with all tokens.
    """

    AS_IT_IS = auto()
    WITHOUT_DROPOUT = auto()
    EVAL = auto()


@contextmanager
def undisturbed(
    models: Sequence[nn.Module], mode: Mode, *, gradients: bool = False, random_states: Sequence[torch.Tensor] = ()
) -> Iterator[Callable[[], bool]]:
    """Context for forward passes that leaves `models` unchanged.

    Yields a function that returns, after the context has exited, True if random numbers were drawn.

    Args:
        models: models to restore. Layers of this package keep their new attributes, which may hold results that ranks
            have agreed on.
        gradients: enable gradients.
        random_states: initial states, from `random_states_now`; by default those of seed 0.
    """
    modules = [module for model in models for module in model.modules()]
    held = [ModuleState.of(module) for module in modules]
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
                    vars(module)[_COMPILED] = None  # run eagerly: it would be recompiled for other parameters
                if mode is Mode.WITHOUT_DROPOUT:
                    vars(module).update(dict.fromkeys(_dropout_names(module), 0.0))
            drew = False
            try:
                yield lambda: drew
            finally:
                drew = not all(map(torch.equal, states, random_states_now()))
    finally:
        for before in held:
            module, attributes = before.module, before.attributes
            if type(module).__module__.startswith("fused_tp."):
                names = ("training", _COMPILED, *_dropout_names(module))
                vars(module).update({name: attributes[name] for name in names if name in attributes})
            else:
                before.apply()
        with torch.no_grad():
            for buffer, value, version in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)


@contextmanager
def _saved_plainly() -> Iterator[None]:
    """Hide saved tensors from the caller's hooks: an activation checkpoint around the context counts its tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    # Detach, because a node that saves its own output would form a reference cycle and never be freed.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
        yield


def _dropout_names(module: nn.Module) -> list[str]:
    """Return the names of the attributes of `module` that are dropout probabilities."""
    own = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ()
    return [n for n, v in vars(module).items() if isinstance(v, float) and (n in own or "drop" in n)]


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def random_states_now() -> list[torch.Tensor]:
    """Return the random states of the CPU and of the current GPU, if there is one."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _devices())]


# -- variables that callers' hooks and forwards write to ---------------------------------------------------------------


def _callers_state(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the containers, closure cells and assigned globals that the callers' code in `modules` can reach."""
    found: dict[object, Any] = {}
    seen: set[int] = set()

    def add(value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH or isinstance(value, _NOT_FOLLOWED) or id(value) in seen:
            return
        seen.add(id(value))
        parts: Iterable[Any] = ()
        if type(value) in _CONTAINERS:
            found[id(value)] = value
            parts = islice(value.values() if isinstance(value, dict) else value, _MAX_ENTRIES)
        elif isinstance(value, partial):
            parts = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            parts = (value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            parts = () if is_of_library(value) else _reached_by(value, found)
        elif _is_of_callers_class(value):
            parts = (vars(value),)
        for part in parts:
            add(part, depth + 1)

    for module in modules:
        for value in code_of(module).values():
            add(value, 0)
        for kind in type(module).__mro__:
            for value in () if is_of_library(kind) else vars(kind).values():
                if isinstance(value, FunctionType):
                    add(value, 0)
        for name, value in vars(module).items():
            if name not in TABLES:
                add(value, 0)
    return [*found.values()]


def _reached_by(function: FunctionType, found: dict[object, Any]) -> Iterator[Any]:
    """Yield the values in the closure of `function` and of the globals that it names.

    The cells of the closure, and the globals that the function assigns to, are added to `found`.
    """
    for cell in function.__closure__ or ():
        found[id(cell)] = cell
        yield _contents(cell)
    for code in _nested_codes(function.__code__):
        for name in code.co_names:
            yield function.__globals__.get(name)
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_GLOBAL" and instruction.argval in function.__globals__:
                name = instruction.argval
                found[id(function.__globals__), name] = function.__globals__, name, function.__globals__[name]


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code`, and the code of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _is_of_callers_class(value: object) -> bool:
    """True if the class of `value` is defined outside installed packages.

    Objects of installed packages are not restored, because threads of those packages may be using them.
    """
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    main = type(value).__module__ == "__main__"
    own = main or (file is not None and not file.startswith(_INSTALLED))
    return own and not is_of_library(type(value)) and hasattr(value, "__dict__")


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@contextmanager
def _kept(state: Sequence[Any]) -> Iterator[None]:
    """Restore the contents of `state` on exit; `state` is a result of `_callers_state`."""
    held = [_contents(one) if isinstance(one, CellType) else copy.copy(one) for one in state]
    try:
        yield
    finally:
        for one, value in zip(state, held, strict=True):
            if isinstance(one, CellType):
                if _contents(one) is not value:
                    one.cell_contents = value
            elif isinstance(one, tuple):
                names, name, before = one
                names[name] = before
            elif _entries(one) == _entries(value):
                pass  # unchanged: do not write, because another thread of the caller may be writing
            elif isinstance(one, list):
                one[:] = value
            else:
                one.clear()
                one.update(value)


def _entries(container: Any) -> list[Any]:
    """Return the identities of the entries of a list, set or dict."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(value) for value in container]
