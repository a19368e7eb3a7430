"""Variables that the callers' code can reach: find them, read them, and restore them.

The callers' code is the forwards, hooks and callable attributes of modules, and the functions that these name.

| variables                                             | found in                             | restored by         |
|-------------------------------------------------------|--------------------------------------|---------------------|
| list, dict, set and other containers of Python        | attributes, closures, globals,       | `_ContainerEntries` |
|                                                       | default arguments, other variables   |                     |
| cell of a closure                                     | functions                            | `_CellContents`     |
| global that a function assigns to, or that is a       | functions                            | `_Names`            |
| tensor                                                |                                      |                     |
| data attributes of a class or of a Python module, and | classes of modules; elsewhere if the | `_Names`            |
| slots of an object                                    | caller defined the class or module   |                     |
| random number generator                               | as containers                        | `_GeneratorState`   |
| array                                                 | as containers                        | `_ArrayElements`    |
| results that a function caches                        | functions under functools.lru_cache  | `_CachedResults`    |

Iterators cannot be restored. Queues and objects of installed packages are not, because other threads may use them.
"""

from __future__ import annotations

import array
import copy
import dis
import random
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from fused_tp.parallelizing.checks.model_check import callers_code, is_library_function
from fused_tp.parallelizing.checks.unsharded import MODULE_DICTS

# Exact types only: iterating over a subclass may run user code.
_SEQUENCE_TYPES, _SET_TYPES = (list, deque, UserList), (set, WeakSet)
_DICT_TYPES = (dict, OrderedDict, defaultdict, Counter, UserDict, WeakKeyDictionary, WeakValueDictionary)
_DATA_TYPES = (bool, int, float, complex, str, bytes, tuple, type(None), torch.Tensor)
_GENERATOR_TYPES = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_ARRAY_TYPES = (np.ndarray, array.array, bytearray)
_LEAF_TYPES = (nn.Module, torch.Tensor, str, bytes, int, float, complex, type(None))
_MAX_DEPTH, _MAX_ENTRIES = 5, 1000  # limits of the search: nesting of variables, and entries of one container
_MAX_ARRAY_BYTES = 4_000_000  # larger arrays are not restored
_INSTALL_PATHS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN_PREFIX = "_fused_tp_"  # of attributes that this package sets
_MISSING = object()


class Variables(ABC):
    """Variables in one place.

    Attributes:
        name: name of the code that reaches them, for messages.
        place: the container, closure cell, namespace or object.
    """

    def __init__(self, name: str, place: Any) -> None:
        self.name, self.place = name, place

    def entries(self) -> dict[object, Any]:
        """Return the values by key; {} if values are not compared."""
        return {}

    @abstractmethod
    def save(self) -> Callable[[], None]:
        """Return a function that restores the present values.

        It writes to containers and namespaces only what has changed, because another thread may be writing.
        """


class _ContainerEntries(Variables):
    def entries(self) -> dict[object, Any]:
        if type(self.place) in _DICT_TYPES:
            return dict(islice(self.place.items(), _MAX_ENTRIES))
        return dict(islice(enumerate(self.place), _MAX_ENTRIES)) if type(self.place) in _SEQUENCE_TYPES else {}

    def save(self) -> Callable[[], None]:
        saved = copy.copy(self.place)

        def restore() -> None:
            if _entry_ids(self.place) == _entry_ids(saved):
                return
            self.place.clear()
            self.place.extend(saved) if type(self.place) in _SEQUENCE_TYPES else self.place.update(saved)

        return restore


class _CellContents(Variables):
    def entries(self) -> dict[object, Any]:
        return {"": _cell_contents(self.place)}

    def save(self) -> Callable[[], None]:
        saved = _cell_contents(self.place)

        def restore() -> None:
            if _cell_contents(self.place) is not saved:
                self.place.cell_contents = saved

        return restore


class _Names(Variables):
    """Names in a namespace: `names` of the globals `place`, or all data attributes of the class or module `place`."""

    def __init__(self, name: str, place: Any, names: Sequence[str] = ()) -> None:
        super().__init__(name, place)
        self._names = names
        self._assign: Callable[[str, Any], None] = (
            place.__setitem__ if isinstance(place, dict) else partial(setattr, place)
        )
        self._delete: Callable[[str], None] = place.__delitem__ if isinstance(place, dict) else partial(delattr, place)

    def entries(self) -> dict[object, Any]:
        if self._names and not isinstance(self.place, dict):  # slots
            values = ((name, getattr(self.place, name, _MISSING)) for name in self._names)
            return {name: value for name, value in values if value is not _MISSING}
        namespace: Mapping[str, Any] = self.place if isinstance(self.place, dict) else vars(self.place)
        if self._names:
            return {name: namespace[name] for name in self._names if name in namespace}
        items = [*namespace.items()]  # another thread may write to the namespace
        return {name: v for name, v in items if type(v) in _DATA_TYPES and not name.startswith("__")}

    def save(self) -> Callable[[], None]:
        saved = self.entries()

        def restore() -> None:
            current = self.entries()
            for name in current.keys() - saved.keys():
                self._delete(str(name))
            for name, value in saved.items():
                if current.get(name, _MISSING) is not value:
                    self._assign(str(name), value)

        return restore


class _GeneratorState(Variables):
    def save(self) -> Callable[[], None]:
        generator = self.place
        if isinstance(generator, random.Random):
            return partial(generator.setstate, generator.getstate())
        if isinstance(generator, np.random.Generator):
            return partial(setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state))
        return partial(generator.set_state, generator.get_state())


class _ArrayElements(Variables):
    def save(self) -> Callable[[], None]:
        saved = copy.copy(self.place)

        def restore() -> None:
            if bytes(self.place) != bytes(saved):
                self.place[... if isinstance(self.place, np.ndarray) else slice(None)] = saved

        return restore


class _CachedResults(Variables):
    """Results of a function under `functools.lru_cache`, or `cache`. If calls add some, all are dropped."""

    def save(self) -> Callable[[], None]:
        num_misses = self.place.cache_info().misses

        def restore() -> None:
            if self.place.cache_info().misses != num_misses:
                self.place.cache_clear()

        return restore


def find_variables(modules: Sequence[nn.Module]) -> list[Variables]:
    """Return the variables that the callers' code of `modules` can reach."""
    variables: dict[object, Variables] = {}
    seen_ids: set[int] = set()

    def add(value: Any, depth: int, name: str) -> None:
        if depth > _MAX_DEPTH or isinstance(value, _LEAF_TYPES) or id(value) in seen_ids:
            return
        seen_ids.add(id(value))
        children: Iterable[Any] = ()
        if type(value) in (*_DICT_TYPES, *_SEQUENCE_TYPES, *_SET_TYPES):
            variables[id(value)] = _ContainerEntries(name, value)
            # A list, because another thread may write to the container meanwhile.
            children = list(islice(value.values() if type(value) in _DICT_TYPES else value, _MAX_ENTRIES))
        elif type(value) is SimpleNamespace:
            children = (vars(value),)
        elif isinstance(value, _GENERATOR_TYPES):
            variables[id(value)] = _GeneratorState(name, value)
        elif isinstance(value, _ARRAY_TYPES):
            if _is_restorable(value):
                variables[id(value)] = _ArrayElements(name, value)
        elif isinstance(value, _lru_cache_wrapper):
            if not is_library_function(value):
                variables[id(value)] = _CachedResults(name, value)
                children = (value.__wrapped__,)
        elif isinstance(value, partial):
            children = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            children = (value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            name = value.__qualname__
            children = _wrapped_functions(value) if is_library_function(value) else _reachable_values(value, variables)
        elif isinstance(value, (type, ModuleType)):
            if is_callers(value):
                name = value.__name__
                variables[id(value)] = _Names(name, value)
                children = [v for v in [*vars(value).values()] if not callable(v)]
        elif is_callers(type(value)):
            if slots := _slots(type(value)):
                variables[id(value)] = _Names(type(value).__name__, value, slots)
            children = (type(value), getattr(value, "__dict__", None), *(getattr(value, s, None) for s in slots))
        for child in children:
            add(child, depth + 1, name)

    for module in modules:
        for value in callers_code(module).values():
            add(value, 0, type(module).__name__)
        for name, value in vars(module).items():
            if name not in MODULE_DICTS and not name.startswith(_OWN_PREFIX):
                add(value, 0, f"{type(module).__name__}.{name}")
        for parameter in module._parameters.values():
            for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
                add(hook, 0, type(module).__name__)
    for module_class in {type(module) for module in modules}:
        for base in module_class.__mro__:
            add(base, 0, base.__name__)
            for value in () if is_library_function(base) else vars(base).values():
                function = getattr(value, "fget", getattr(value, "__func__", value))  # of a property or classmethod
                if isinstance(function, (FunctionType, _lru_cache_wrapper)):
                    add(function, 0, function.__qualname__)
    return [*variables.values()]


def is_callers(definition: Any) -> bool:
    """True if the class or Python module `definition` is defined outside installed packages."""
    module_name = definition.__name__ if isinstance(definition, ModuleType) else definition.__module__
    filename = getattr(sys.modules.get(module_name), "__file__", None)
    # torch.ops has a relative file name.
    is_outside = filename is not None and Path(filename).is_absolute() and not filename.startswith(_INSTALL_PATHS)
    is_outside |= module_name == "__main__"
    return is_outside and (isinstance(definition, ModuleType) or not is_library_function(definition))


def _slots(object_class: type) -> list[str]:
    slots = chain.from_iterable(
        [s] if isinstance(s, str) else s for s in (vars(b).get("__slots__", ()) for b in object_class.__mro__)
    )
    return [name for name in slots if name not in ("__dict__", "__weakref__")]


def _is_restorable(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return len(value) <= _MAX_ARRAY_BYTES
    return value.flags.writeable and value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject


def _reachable_values(function: FunctionType, variables: dict[object, Variables]) -> Iterator[Any]:
    """Yield the values in attributes, default arguments and closure of `function`, and of the globals that it names.

    Add to `variables` the cells of the closure, and the globals that are tensors or that the function assigns to.
    """
    yield vars(function)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        variables[id(cell)] = _CellContents(f"{name} of {function.__qualname__}", cell)
        yield _cell_contents(cell)
    named, assigned = _global_names(function.__code__)
    for name in named:
        value = function.__globals__.get(name)
        if isinstance(value, torch.Tensor) or (name in assigned and name in function.__globals__):
            variables[id(function.__globals__), name] = _Names(name, function.__globals__, [name])
        yield value


def _wrapped_functions(function: FunctionType) -> Iterator[Any]:
    """Yield the functions in the closure of `function`, such as a hook that torch's register_multi_grad_hook wraps."""
    values = (_cell_contents(cell) for cell in function.__closure__ or ())
    yield from (value for value in values if isinstance(value, (FunctionType, MethodType, partial)))


@lru_cache(maxsize=10_000)
def _global_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and attributes in `code`, and those of the globals that it assigns to."""
    codes = [*_nested_codes(code)]
    instructions = (instruction for nested_code in codes for instruction in dis.get_instructions(nested_code))
    assigned = {i.argval for i in instructions if i.opname == "STORE_GLOBAL"}
    return frozenset(name for nested_code in codes for name in nested_code.co_names) | assigned, frozenset(assigned)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code`, and the code of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _entry_ids(container: Any) -> list[Any]:
    """Return the identities of the entries of a container."""
    if type(container) in _DICT_TYPES:
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(value) for value in container]
