"""Restore a parallel model to its unsharded state, from before `parallelize`, for the duration of a context.

| of each module         | state in the context                                                           |
|------------------------|--------------------------------------------------------------------------------|
| class, attributes      | as before sharding, except attributes assigned since then                      |
| hooks                  | hooks from before sharding, and hooks registered since then                    |
| submodules             | the layers from before sharding, with changes made since to their replacements |
|                        | (modules that the caller has replaced since then stay, with full parameters)   |
| parameters             | full tensors, passed by the caller                                             |
| buffers                | the current buffers, and the buffers of replaced layers                        |

So the callers' current code runs, unsharded, on each rank alone. Rejected: a copy of the model, made before sharding.
Functions that callers have set on modules would still compute with modules of the sharded model, and later changes
would be missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.parallelizing.hf.hf_model import is_transformers_model

# Dicts of every module: parameters, buffers, modules, hooks.
MODULE_DICTS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_RESTORED_SEPARATELY = {"_parameters", "_buffers"}  # `restore` fills these itself


@dataclass(frozen=True)
class _ObjectId:
    """Identity of a module or tensor, without a reference that would keep its memory alive."""

    object_id: int


def _identity(value: object) -> object:
    return _ObjectId(id(value)) if isinstance(value, (nn.Module, Tensor)) else value


def _is_same(value: object, identity: object) -> bool:
    return identity == _ObjectId(id(value)) if isinstance(identity, _ObjectId) else identity is value


@dataclass
class ModuleState:
    """State of a module, or of another object with attributes.

    Attributes:
        module: the object.
        module_class: its class.
        attributes: its other attributes.
        dicts: entries of its dicts of parameters, buffers, submodules and hooks, by the attribute's name.
    """

    module: Any
    module_class: type
    attributes: dict[str, Any]
    dicts: dict[str, dict[Any, Any]]

    @staticmethod
    def from_module(module: Any) -> ModuleState:
        attributes = dict(vars(module))
        dicts = {name: dict(attributes[name]) for name in MODULE_DICTS if isinstance(attributes.get(name), dict)}
        return ModuleState(module, type(module), {k: v for k, v in attributes.items() if k not in dicts}, dicts)

    def apply(self) -> None:
        """Restore `module` to this state. Its dicts are changed in place, because handles of hooks refer to them."""
        module, attributes = self.module, vars(self.module)
        live_dicts = {name: attributes[name] for name in self.dicts}
        attributes.clear()
        for name, entries in self.dicts.items():
            live_dicts[name].clear()
            live_dicts[name].update(entries)
        attributes.update(self.attributes)
        attributes.update(live_dicts)
        if type(module) is not self.module_class:
            module.__class__ = self.module_class

    def without_tensors(self) -> ModuleState:
        """Return a copy for comparisons, with identities in place of tensors and modules."""
        dicts = {name: {k: _identity(v) for k, v in entries.items()} for name, entries in self.dicts.items()}
        return ModuleState(None, self.module_class, {k: _identity(v) for k, v in self.attributes.items()}, dicts)

    def with_changes(self, sharded_state: ModuleState, current_state: ModuleState) -> ModuleState:
        """Return this pre-sharding state with the changes from `sharded_state` to `current_state` applied."""
        module_class = (
            self.module_class
            if current_state.module_class is sharded_state.module_class
            else current_state.module_class
        )
        attributes = _merge_changes(self.attributes, sharded_state.attributes, current_state.attributes)
        dicts = {
            name: _merge_changes(entries, sharded_state.dicts.get(name, {}), current_state.dicts.get(name, {}))
            for name, entries in self.dicts.items()
            if name not in _RESTORED_SEPARATELY
        }
        return ModuleState(self.module, module_class, attributes, dicts)


def _merge_changes(
    original_entries: Mapping[Any, Any], sharded_entries: Mapping[Any, Any], current_entries: Mapping[Any, Any]
) -> dict[Any, Any]:
    unchanged = {
        key: value for key, value in original_entries.items() if key in current_entries or key not in sharded_entries
    }
    return unchanged | {
        key: value
        for key, value in current_entries.items()
        if key not in sharded_entries or not _is_same(value, sharded_entries[key])
    }


class UnshardedModel:
    """State of a model before it is sharded, without its parameters.

    Example:
        >>> unsharded = UnshardedModel(model)
        >>> shard(model)
        >>> unsharded.record_sharded(model)
        >>> with unsharded.restore(model, full_parameters):
        ...     model(tokens)                          # on this rank alone
    """

    def __init__(self, model: nn.Module) -> None:
        self._original_states = {name: ModuleState.from_module(module) for name, module in model.named_modules()}
        for state in self._original_states.values():
            state.dicts["_parameters"] = dict.fromkeys(state.dicts["_parameters"])
        self._config_states = {id(config): ModuleState.from_module(config) for config in model_configs(model)}
        self._sharded_states: dict[str, ModuleState] = {}
        self._sharded_modules: dict[str, weakref.ref[nn.Module]] = {}
        self._sharded_config_states: dict[int, ModuleState] = {}

    def __reduce__(self) -> Any:
        return UnshardedModel, (nn.Module(),)  # a copy of the model has other modules

    def record_sharded(self, model: nn.Module) -> None:
        """Record the state of `model` after sharding."""
        self._sharded_states = {
            name: ModuleState.from_module(module).without_tensors() for name, module in model.named_modules()
        }
        self._sharded_modules = {name: weakref.ref(module) for name, module in model.named_modules()}
        # Keep only the buffers that the replacement layer does not have.
        for name, original_state in self._original_states.items():
            new_buffers = self._sharded_states[name].dicts["_buffers"] if name in self._sharded_states else {}
            original_state.dicts["_buffers"] = {
                k: None if k in new_buffers else v for k, v in original_state.dicts["_buffers"].items()
            }
        self._sharded_config_states = {
            id(config): ModuleState.from_module(config).without_tensors() for config in model_configs(model)
        }

    def reason_not_restorable(self, model: nn.Module) -> str:
        """Return the reason why `model` cannot be restored to its unsharded state, or ""."""
        if not self._sharded_states:
            return "it is a copy of the model that parallelize returned"
        names = {name for name, _ in model.named_modules()}
        changed_names = sorted(
            names.symmetric_difference(self._sharded_states) or names.symmetric_difference(self._original_states)
        )
        return f"the modules {changed_names[:3]} were added or removed after parallelize" if changed_names else ""

    @contextmanager
    def restore(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which `model` is unsharded.

        Args:
            parameters: full tensors by name; tied parameters under each of their names.
        """
        current_states = {name: ModuleState.from_module(module) for name, module in model.named_modules()}
        device = next(iter(parameters.values())).device
        unsharded_states: list[ModuleState] = []
        for name, original_state in self._original_states.items():
            current_state = current_states[name]
            is_replaced = current_state.module is not self._sharded_modules[name]()  # since sharding, by the caller
            state = (
                ModuleState.from_module(current_state.module)
                if is_replaced
                else original_state.with_changes(self._sharded_states[name], current_state)
            )
            prefix = f"{name}." if name else ""
            parameter_names = (current_state if is_replaced else original_state).dicts["_parameters"]
            state.dicts["_parameters"] = {key: parameters.get(f"{prefix}{key}") for key in parameter_names}
            if not is_replaced:
                replaced_buffers = {key: _to_device(device, b) for key, b in original_state.dicts["_buffers"].items()}
                state.dicts["_buffers"] = replaced_buffers | current_state.dicts["_buffers"]
            unsharded_states.append(state)
        for config, config_state in zip(model_configs(model), self._config_states.values(), strict=False):
            if (sharded_config_state := self._sharded_config_states.get(id(config))) is not None:
                unsharded_states.append(
                    config_state.with_changes(sharded_config_state, ModuleState.from_module(config))
                )
        saved_states = [ModuleState.from_module(state.module) for state in unsharded_states]
        unsharded_ids = {id(state.module) for state in unsharded_states}
        saved_states += [state for state in current_states.values() if id(state.module) not in unsharded_ids]
        try:
            for state in unsharded_states:
                state.apply()
            yield
        finally:
            for state in saved_states:
                state.apply()


def _to_device(device: torch.device, buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.to(device)


def model_configs(model: nn.Module) -> list[Any]:
    """Return the configs of the transformers models in `model`, each once."""
    configs = (module.config for module in model.modules() if is_transformers_model(module))
    return [*{id(config): config for config in configs}.values()]
