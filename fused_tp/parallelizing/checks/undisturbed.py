"""Context for forward passes that leave a model, random states and variables of the callers' code unchanged.

On exit it restores attributes, hooks and buffers of modules and, unless the model is large, parameters. It also
restores variables that the callers' code can reach (`reachable`), and the tensors in all of these. Output to files and
terminals cannot be undone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fused_tp.parallelizing.checks.batch_check import suspend_checks
from fused_tp.parallelizing.checks.model_check import is_library_function
from fused_tp.parallelizing.checks.reachable import Variables, find_variables
from fused_tp.parallelizing.checks.unsharded import MODULE_DICTS, ModuleState
from fused_tp.parallelizing.forward_shard import tensor_version

_COMPILED_ATTRIBUTE = "_compiled_call_impl"  # attribute set by `module.compile()`
LARGE_MODEL_PARAMETERS = 32_000_000  # parameters of larger models are not copied
_MAX_TENSOR_NUMEL = 1_000_000  # larger tensors in variables are not restored, nor those beyond LARGE_MODEL_PARAMETERS


class Mode(Enum):
    """Modes of a model in a comparison, in the order in which they are tried.

    A mode is rejected if forward draws random numbers in it: a rank with a shard of the tokens draws different numbers
    than a process with all tokens.
    """

    AS_IT_IS = auto()
    WITHOUT_DROPOUT = auto()
    EVAL = auto()


@dataclass(frozen=True)
class VariableId:
    """Identity of a variable that the callers' code can reach, or of an attribute of a module.

    Attributes:
        container: id of the container, closure cell or module.
        key: its key there.
        description: name for messages.
        is_read: True for a number that code reads from a tensor, at the place `description`.
    """

    container: int
    key: str
    description: str = field(compare=False)
    is_read: bool = False

    @property
    def sentence(self) -> str:
        """Words for what the code does with the variable."""
        if self.is_read:
            return f"reads another number from a tensor at {self.description}"
        return f"writes other values to the {self.description}"


@contextmanager
def preserve_state(
    models: Sequence[nn.Module],
    mode: Mode,
    *,
    with_gradients: bool = False,
    random_states: Sequence[torch.Tensor] = (),
    written_variables: dict[VariableId, Any] | None = None,
) -> Iterator[Callable[[], bool]]:
    """Context for forward passes that leaves `models` unchanged.

    Yields a function that returns, after the context has exited, True if random numbers were drawn.

    Args:
        models: models to restore. Layers of this package keep their new attributes, which may hold results that ranks
            have agreed on.
        with_gradients: enable gradients.
        random_states: initial states, from `current_random_states`; by default those of seed 0.
        written_variables: receives the tensors and numbers that the code in the context has written to variables.
    """
    modules = [module for model in models for module in model.modules()]
    module_states = [ModuleState.from_module(module) for module in modules]
    saved_tensors = [
        (t, is_buffer, t.detach().clone(), tensor_version(t))
        for t, is_buffer in _tensors_to_save(models)
        if not t.is_meta
    ]
    reachable = find_variables(modules)
    state_tensors = {
        id(t): (t, t.detach().clone(), tensor_version(t)) for t in _state_tensors(module_states, reachable)
    }
    saved_entries = [] if written_variables is None else [variables.entries() for variables in reachable]
    try:
        with (
            _restore_on_exit(reachable),
            _fork_host_generators(),
            torch.random.fork_rng(_initialized_gpus()),
            torch.set_grad_enabled(with_gradients),
            suspend_checks(),
            _hide_saved_tensors(),
        ):
            torch.manual_seed(0)
            for device, random_state in zip((None, *_initialized_gpus()), random_states, strict=False):
                torch.set_rng_state(random_state) if device is None else torch.cuda.set_rng_state(random_state, device)
            initial_states = current_random_states()
            for module in modules:
                module.training &= mode is not Mode.EVAL
                if _COMPILED_ATTRIBUTE in vars(module):
                    vars(module)[_COMPILED_ATTRIBUTE] = None  # run eagerly: it would be recompiled for other parameters
                if mode is Mode.WITHOUT_DROPOUT:
                    vars(module).update(dict.fromkeys(_dropout_names(module), 0.0))
            drew_random = False
            try:
                yield lambda: drew_random
            finally:
                drew_random = not all(map(torch.equal, initial_states, current_random_states()))
                if written_variables is not None:
                    changes = [*_changes(module_states, reachable, saved_entries)]
                    written_variables.update(
                        (variable, value.detach().clone() if isinstance(value, torch.Tensor) else value)
                        for variable, saved_value, value in changes
                        if _is_written(saved_value, value, state_tensors)
                    )
    finally:
        for module_state in module_states:
            module, attributes = module_state.module, module_state.attributes
            if type(module).__module__.startswith("fused_tp."):
                names = ("training", _COMPILED_ATTRIBUTE, *_dropout_names(module))
                vars(module).update({name: attributes[name] for name in names if name in attributes})
            else:
                module_state.apply()
        with torch.no_grad():
            for t, value, version in state_tensors.values():
                if tensor_version(t) != version:
                    t.detach().copy_(value)
            for t, is_buffer, value, version in saved_tensors:
                # Batch norm updates its running statistics without incrementing the tensor's version counter.
                can_compare = is_buffer and type(t) is torch.Tensor and t.layout == torch.strided
                is_written = tensor_version(t) != version or (can_compare and not torch.equal(t, value))
                if is_written:
                    t.copy_(value)


@contextmanager
def _fork_host_generators() -> Iterator[None]:
    """Seed the global random number generators of Python and numpy with 0, and restore them on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    random.seed(0)
    with suppress(TypeError):  # another bit generator than numpy's default has no seed
        np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _restore_on_exit(reachable: Sequence[Variables]) -> Iterator[None]:
    restorers = [variables.save() for variables in reachable]
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def _tensors_to_save(models: Sequence[nn.Module]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield (tensor, True if it is a buffer) that forward may write to: not the parameters of large models."""
    parameters = [p._local_tensor if isinstance(p, DTensor) else p for model in models for p in model.parameters()]
    for model in models:
        yield from ((buffer, True) for buffer in model.buffers())
    if sum(p.numel() for p in parameters) <= LARGE_MODEL_PARAMETERS:
        # Other classes, such as quantized weights, may not support copies.
        yield from ((p, False) for p in parameters if type(p).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


@contextmanager
def _hide_saved_tensors() -> Iterator[None]:
    """Hide saved tensors from torch's hooks, because an activation checkpoint counts the tensors that it sees."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not is_library_function(hooks[0]):
        yield
        return
    # Detach, because a node that saves its own output would form a reference cycle and never be freed.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
        yield


def _dropout_names(module: nn.Module) -> list[str]:
    """Return the names of the attributes of `module` that are dropout probabilities."""
    known_names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ()
    return [n for n, v in vars(module).items() if isinstance(v, float) and (n in known_names or "drop" in n)]


def _initialized_gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def current_random_states() -> list[torch.Tensor]:
    """Return the random states of the CPU and of the current GPU, if there is one."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _initialized_gpus())]


# -- variables that callers' hooks and forwards write to ---------------------------------------------------------------


def _state_tensors(module_states: Sequence[ModuleState], reachable: Sequence[Variables]) -> Iterator[torch.Tensor]:
    """Yield the dense tensors in variables and in attributes of modules, into which the callers' code may write."""
    numel, seen_ids = 0, set()
    attributes = (value for module_state in module_states for value in module_state.attributes.values())
    for value in chain(attributes, (value for variables in reachable for value in variables.entries().values())):
        is_dense = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta
        if is_dense and id(value) not in seen_ids and value.numel() <= _MAX_TENSOR_NUMEL:
            seen_ids.add(id(value))
            numel += value.numel()
            if numel > LARGE_MODEL_PARAMETERS:
                return
            yield value


def _changes(
    module_states: Sequence[ModuleState], reachable: Sequence[Variables], saved_entries: Sequence[Mapping[object, Any]]
) -> Iterator[tuple[VariableId, Any, Any]]:
    """Yield (variable, value before, value now) of variables and attributes of modules."""
    for module_state in module_states:
        name = type(module_state.module).__name__
        if type(module_state.module).__module__.startswith("fused_tp."):
            continue
        for key, value in vars(module_state.module).items():
            if key not in MODULE_DICTS and key != "training":
                variable = VariableId(id(module_state.module), key, f"attribute {key!r} of a {name}")
                yield variable, module_state.attributes.get(key), value
    for variables, entries in zip(reachable, saved_entries, strict=True):
        for index, (entry_key, value) in enumerate(variables.entries().items()):
            description = f"entry {str(entry_key)[:40]!r} of a variable of {variables.name}"
            if entry_key in ("", variables.name):
                description = f"variable {variables.name}"
            # By position: sharding replaces modules.
            key = f"module {index}" if isinstance(entry_key, nn.Module) else repr(entry_key)[:80]
            yield VariableId(id(variables.place), key, description), entries.get(entry_key), value


def _is_written(
    saved_value: Any, value: Any, state_tensors: Mapping[int, tuple[torch.Tensor, torch.Tensor, Any]]
) -> bool:
    if type(value) is torch.Tensor:
        return saved_value is not value or (
            id(value) in state_tensors and tensor_version(value) != state_tensors[id(value)][2]
        )
    return isinstance(value, (int, float)) and not (type(saved_value) is type(value) and saved_value == value)
