"""Conditions of a call that decide what a model computes, apart from its arguments.

| condition                                              | example of a change                                       |
|--------------------------------------------------------|-----------------------------------------------------------|
| callers' code: forwards, hooks, callable attributes    | a forward hook, of a module or global                     |
| flags, texts, None, numbers and functions in modules,  | `layer.clip = True`, `alpha.fill_(0.5)`,                  |
| in buffers of up to 64 elements, and in variables of   | `ACTIVATIONS["silu"] = other`                             |
| the callers' code                                      |                                                           |
| functions of torch and of the modules' source files    | `torch.nn.functional.gelu = other`                        |
| transformers' functions of attention                   | `ALL_ATTENTION_FUNCTIONS["sdpa"] = other`                 |
| contexts of torch and Python                           | a TorchFunctionMode, hooks on saved tensors, a ContextVar |

A comparison with the unsharded model covers the conditions at that call. `ComparedConditions` finds new ones.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fused_tp.parallelizing.checks.model_check import callers_code
from fused_tp.parallelizing.checks.reachable import find_variables
from fused_tp.parallelizing.checks.unsharded import MODULE_DICTS, model_configs

_GLOBAL_HOOKS = {name: value for name, value in vars(nn.modules.module).items() if isinstance(value, OrderedDict)}
_MAX_NUMBERS = 3  # a variable with more values is a counter or a measurement, whose values are not compared
_MAX_NUMEL = 64  # larger tensors are data, and longer lists histories


@dataclass(frozen=True)
class Conditions:
    """Conditions of a call, by the place and name of what holds them.

    Attributes:
        states: code, flags and contexts; of a number, whether it is zero, finite or infinite.
        numbers: values of numbers, and of the elements of small tensors.
        functions: functions and classes of source files. Names that a file gets later are no change.
    """

    states: dict[object, object] = field(default_factory=dict)
    numbers: dict[object, float | tuple[float, ...]] = field(default_factory=dict)
    functions: dict[object, object] = field(default_factory=dict)

    def add_value(self, key: object, value: object) -> None:
        """Add the value of a variable or attribute."""
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.is_meta or value.is_complex() or not 0 < value.numel() <= _MAX_NUMEL:
                return
            if value.numel() > 1:
                self.numbers[key] = tuple(value.flatten().tolist())
                return
            value = value.item()
        if isinstance(value, (bool, str)) or value is None:
            self.states[key] = value
        elif isinstance(value, (int, float)):
            self.states[key] = "zero" if value == 0 else "finite" if math.isfinite(value) else str(value)
            self.numbers[key] = value
        else:
            self.states[key] = _identify_code(value)


def _identify_code(value: object) -> object:
    """Return the code of a function, and the type of another object. A function may be defined again at every call."""
    if isinstance(value, partial):
        return _identify_code(value.func)
    if isinstance(value, MethodType):
        return value.__func__.__code__ if isinstance(value.__func__, FunctionType) else value.__func__
    if isinstance(value, FunctionType):
        return value.__code__
    return value if isinstance(value, (BuiltinFunctionType, type)) else type(value)


def find_conditions(model: nn.Module) -> Conditions:
    """Return the conditions of a call of `model` that starts now."""
    conditions = Conditions()
    modules = dict(model.named_modules())
    source_files: dict[str, object] = {"torch": torch, "torch.nn.functional": nn.functional}
    for name, module in modules.items():
        conditions.states.update({(name, part): code for part, code in callers_code(module).items()})
        class_module = type(module).__module__
        if class_module.startswith("fused_tp."):
            continue
        source_files[class_module] = sys.modules.get(class_module)
        for key, value in vars(module).items():
            if key not in MODULE_DICTS and key != "training":
                conditions.add_value((name, key), value)
        for key, buffer in module._buffers.items():
            conditions.add_value((name, key), buffer)
    for table_name, table in _GLOBAL_HOOKS.items():
        conditions.states.update({(table_name, index): hook for index, hook in enumerate(table.values())})
    for config_index, config in enumerate(model_configs(model)):
        for key, value in vars(config).items():
            conditions.add_value(("config", config_index, key), value)
        if (attention := _attention_function(config)) is not None:
            conditions.add_value(("attention", config_index), attention)
    counts: Counter[str] = Counter()  # by name, not by id: callers may replace a container at every call
    for variables in find_variables([*modules.values()]):
        counts[variables.name] += 1
        for entry_key, value in islice(variables.entries().items(), _MAX_NUMEL):
            if isinstance(entry_key, (str, int)):
                conditions.add_value(_Entry(variables.name, counts[variables.name], entry_key), value)
    for file_name, file in source_files.items():
        names = [*vars(file).items()] if file else []
        conditions.functions.update({(file_name, name): value for name, value in names if callable(value)})
    saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    conditions.states["contexts"] = [
        *map(type, (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())),
        *(getattr(hook, "__code__", None) for hook in saved_tensor_hooks or () if isinstance(hook, FunctionType)),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        frozenset(os.environ.items()),
    ]
    for variable, value in contextvars.copy_context().items():
        conditions.add_value(("ContextVar", variable.name), value)
    return conditions


def _attention_function(config: Any) -> object:
    """Return the function that transformers looks up for the attention of `config`; None if there is none."""
    name, utils = getattr(config, "_attn_implementation", None), sys.modules.get("transformers.modeling_utils")
    return utils.ALL_ATTENTION_FUNCTIONS.get(name) if utils is not None and isinstance(name, str) else None


class _Entry(NamedTuple):
    """Key of an entry of a container. In a list it is an index, and entries that are added later are a history."""

    name: str
    container: int
    key: str | int


class ComparedConditions:
    """Conditions under which a model has been compared."""

    def __init__(self) -> None:
        self._states: dict[object, list[object]] = {}
        self._numbers: dict[object, list[float | tuple[float, ...]]] = {}
        self._functions: dict[object, list[object]] = {}
        self._is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_states": {},
            "_numbers": {},
            "_functions": {},
            "_is_copy": True,
        }  # the code of a copied model cannot be compared

    def has_new(self, conditions: Conditions) -> bool:
        """True if a condition has a value under which the model has not been compared."""
        if self._is_copy:
            return False
        return (
            any(
                not _contains(self._states.get(key, ()), value)
                for key, value in conditions.states.items()
                if key in self._states or not _is_later_entry(key)
            )
            or any(
                not _contains(self._functions.get(key, [value]), value) for key, value in conditions.functions.items()
            )
            or any(
                len(numbers := self._numbers.get(key, [])) < _MAX_NUMBERS and value not in numbers
                for key, value in conditions.numbers.items()
                if key in self._numbers or not _is_later_entry(key)
            )
        )

    def add(self, conditions: Conditions) -> None:
        """Record that the model has been compared under `conditions`."""
        _add_values(self._states, conditions.states)
        _add_values(self._numbers, conditions.numbers)
        _add_values(self._functions, conditions.functions)


def _is_later_entry(key: object) -> bool:
    return isinstance(key, _Entry) and isinstance(key.key, int)


def _contains(values: Any, value: object) -> bool:
    return any(value is known or (type(value) is type(known) and value == known) for known in values)


def _add_values(known_values: dict[object, list[Any]], values: Mapping[object, Any]) -> None:
    for key, value in values.items():
        known = known_values.setdefault(key, [])
        if not _contains(known, value):
            known.append(value)
