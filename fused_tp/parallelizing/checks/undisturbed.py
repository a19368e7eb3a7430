"""Context for forward passes that leave a model, random states and variables of the callers' code unchanged.

On exit it restores attributes, hooks and buffers of modules and, unless the model is large, parameters. It also
restores variables that the callers' code (forwards, hooks, helpers) can reach: containers, closures, globals that it
assigns, objects of the callers' classes, and the tensors in all of these. Output to files and terminals cannot be
undone.
"""

from __future__ import annotations

import copy
import dis
import sys
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import chain, islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fused_tp.parallelizing.checks.batch_check import suspend_checks
from fused_tp.parallelizing.checks.model_check import callers_code, is_library_function
from fused_tp.parallelizing.checks.unsharded import MODULE_DICTS, ModuleState
from fused_tp.parallelizing.forward_shard import tensor_version

# Exact types only: iterating a subclass may run user code.
_CONTAINER_TYPES = (list, dict, set, OrderedDict, defaultdict)
_COMPILED_ATTRIBUTE = "_compiled_call_impl"  # attribute set by `module.compile()`
_LEAF_TYPES = (nn.Module, torch.Tensor, ModuleType, type, str, bytes, int, float, complex, type(None))
LARGE_MODEL_PARAMETERS = 32_000_000  # parameters of larger models are not copied
_MAX_TENSOR_NUMEL = 1_000_000  # larger tensors in variables are not restored, nor those beyond LARGE_MODEL_PARAMETERS
_MAX_DEPTH, _MAX_ENTRIES = 5, 1000  # limits of the search: nesting of containers, and entries of one container
_INSTALL_PATHS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


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
    """

    container: int
    key: str
    description: str = field(compare=False)


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
    reachable_state = _reachable_state(modules)
    state_tensors = {
        id(t): (t, t.detach().clone(), tensor_version(t)) for t in _state_tensors(module_states, reachable_state)
    }
    try:
        with (
            _restore_on_exit([container for _, container in reachable_state]) as saved_containers,
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
                    variables = [*_variables(module_states, reachable_state, saved_containers)]
                    written_variables.update(
                        (variable, value.detach().clone() if isinstance(value, torch.Tensor) else value)
                        for variable, saved_value, value in variables
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
    """Hide saved tensors from the caller's hooks, because an activation checkpoint counts the tensors that it sees."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
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


def _reachable_state(modules: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """Return (name, value) of the containers, closure cells and assigned globals that the callers' code can reach."""
    reachable_state: dict[object, tuple[str, Any]] = {}
    seen_ids: set[int] = set()

    def add(value: Any, depth: int, name: str) -> None:
        if depth > _MAX_DEPTH or isinstance(value, _LEAF_TYPES) or id(value) in seen_ids:
            return
        seen_ids.add(id(value))
        children: Iterable[Any] = ()
        if type(value) in _CONTAINER_TYPES:
            reachable_state[id(value)] = name, value
            children = islice(value.values() if isinstance(value, dict) else value, _MAX_ENTRIES)
        elif isinstance(value, partial):
            children = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            children = (value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            name = value.__qualname__
            children = () if is_library_function(value) else _reachable_values(value, reachable_state)
        elif _is_of_callers_class(value):
            children = (vars(value),)
        for child in children:
            add(child, depth + 1, name)

    for module in modules:
        for value in callers_code(module).values():
            add(value, 0, type(module).__name__)
        for name, value in vars(module).items():
            if name not in MODULE_DICTS and not isinstance(value, _LEAF_TYPES):
                add(value, 0, f"{type(module).__name__}.{name}")
    for module_class in {type(module) for module in modules}:
        for base in module_class.__mro__:
            for value in () if is_library_function(base) else vars(base).values():
                if isinstance(value, FunctionType):
                    add(value, 0, value.__qualname__)
    return [*reachable_state.values()]


def _reachable_values(function: FunctionType, reachable_state: dict[object, tuple[str, Any]]) -> Iterator[Any]:
    """Yield the values in the closure of `function` and of the globals that it names.

    Add to `reachable_state` the cells of the closure, and the globals that are tensors or that the function assigns to.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        reachable_state[id(cell)] = f"{name} of {function.__qualname__}", cell
        yield _cell_contents(cell)
    for code in _nested_codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, torch.Tensor):
                reachable_state[id(function.__globals__), name] = name, (function.__globals__, name, value)
            yield value
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_GLOBAL" and instruction.argval in function.__globals__:
                name = instruction.argval
                assigned = function.__globals__, name, function.__globals__[name]
                reachable_state[id(function.__globals__), name] = name, assigned


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
    filename = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    is_main = type(value).__module__ == "__main__"
    is_outside = is_main or (filename is not None and not filename.startswith(_INSTALL_PATHS))
    return is_outside and not is_library_function(type(value)) and hasattr(value, "__dict__")


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _entries(container: Any) -> Iterable[tuple[object, Any]]:
    """Return the keys and values in a container, closure cell or assigned global."""
    if isinstance(container, CellType):
        return [("", _cell_contents(container))]
    if isinstance(container, tuple):
        namespace, name, _ = container
        return [(name, namespace.get(name))]
    if isinstance(container, dict):
        return islice(container.items(), _MAX_ENTRIES)
    return islice(enumerate(container), _MAX_ENTRIES) if isinstance(container, list) else ()


def _state_tensors(module_states: Sequence[ModuleState], state: Sequence[tuple[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield the dense tensors in variables and in attributes of modules, into which the callers' code may write."""
    numel, seen_ids = 0, set()
    attributes = (value for module_state in module_states for value in module_state.attributes.values())
    for value in chain(attributes, (value for _, container in state for _, value in _entries(container))):
        is_dense = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta
        if is_dense and id(value) not in seen_ids and value.numel() <= _MAX_TENSOR_NUMEL:
            seen_ids.add(id(value))
            numel += value.numel()
            if numel > LARGE_MODEL_PARAMETERS:
                return
            yield value


def _variables(
    module_states: Sequence[ModuleState], state: Sequence[tuple[str, Any]], saved_values: Sequence[Any]
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
    for (name, container), saved_value in zip(state, saved_values, strict=True):
        values_before: dict[object, Any] = {"": saved_value} if isinstance(container, CellType) else {}
        if isinstance(container, tuple):
            values_before = {container[1]: container[2]}
        elif not isinstance(container, CellType):
            values_before = dict(_entries(saved_value))
        for key, value in _entries(container):
            description = f"variable {name}" if key == "" else f"entry {str(key)[:40]!r} of a variable of {name}"
            yield VariableId(id(container), repr(key)[:80], description), values_before.get(key), value


def _is_written(
    saved_value: Any, value: Any, state_tensors: Mapping[int, tuple[torch.Tensor, torch.Tensor, Any]]
) -> bool:
    if type(value) is torch.Tensor:
        return saved_value is not value or (
            id(value) in state_tensors and tensor_version(value) != state_tensors[id(value)][2]
        )
    return isinstance(value, (int, float)) and not (type(saved_value) is type(value) and saved_value == value)


@contextmanager
def _restore_on_exit(state: Sequence[Any]) -> Iterator[list[Any]]:
    """Restore the contents of `state` on exit; `state` is a result of `_reachable_state`. Yields copies of it."""
    saved_values = [
        _cell_contents(container) if isinstance(container, CellType) else copy.copy(container) for container in state
    ]
    try:
        yield saved_values
    finally:
        for container, value in zip(state, saved_values, strict=True):
            if isinstance(container, CellType):
                if _cell_contents(container) is not value:
                    container.cell_contents = value
            elif isinstance(container, tuple):
                namespace, name, previous = container
                namespace[name] = previous
            elif _entry_ids(container) == _entry_ids(value):
                pass  # unchanged: do not write, because another thread of the caller may be writing
            elif isinstance(container, list):
                container[:] = value
            else:
                container.clear()
                container.update(value)


def _entry_ids(container: Any) -> list[Any]:
    """Return the identities of the entries of a list, set or dict."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(value) for value in container]
