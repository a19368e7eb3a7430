"""Restore a parallel model to its unsharded state, from before `parallelize`, for the duration of a context.

| of each module         | state in the context                                                           |
|------------------------|--------------------------------------------------------------------------------|
| class, attributes      | as before sharding, except attributes assigned since then                      |
| hooks                  | hooks from before sharding, and hooks registered since then                    |
| submodules             | the layers from before sharding, with changes made since to their replacements |
| parameters             | full tensors, passed by the caller                                             |
| buffers                | the current buffers, and the buffers of replaced layers                        |

So the callers' current code runs, unsharded, on each rank alone. Rejected: a copy of the model, made before sharding.
Functions that callers have set on modules would still compute with modules of the sharded model, and later changes
would be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.parallelizing.hf.hf_model import is_transformers_model

# Dicts of every module: parameters, buffers, modules, hooks.
TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_BY_NAME = {"_parameters", "_buffers"}  # `restored` fills these itself


@dataclass(frozen=True)
class _Id:
    """Identity of a module or tensor, without a reference that would keep its memory alive."""

    number: int


def _noted(value: object) -> object:
    return _Id(id(value)) if isinstance(value, (nn.Module, Tensor)) else value


def _is(value: object, noted: object) -> bool:
    return noted == _Id(id(value)) if isinstance(noted, _Id) else noted is value


@dataclass
class ModuleState:
    """State of a module, or of another object with attributes.

    Attributes:
        module: the object.
        kind: its class.
        attributes: its other attributes.
        tables: entries of its dicts of parameters, buffers, submodules and hooks, by the attribute's name.
    """

    module: Any
    kind: type
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]

    @staticmethod
    def of(module: Any) -> ModuleState:
        held = dict(vars(module))
        tables = {name: dict(held[name]) for name in TABLES if isinstance(held.get(name), dict)}
        return ModuleState(module, type(module), {k: v for k, v in held.items() if k not in tables}, tables)

    def apply(self) -> None:
        """Restore `module` to this state. Its dicts are changed in place, because handles of hooks refer to them."""
        module, held = self.module, vars(self.module)
        own = {name: held[name] for name in self.tables}
        held.clear()
        for name, entries in self.tables.items():
            own[name].clear()
            own[name].update(entries)
        held.update(self.attributes)
        held.update(own)
        if type(module) is not self.kind:
            module.__class__ = self.kind

    def without_tensors(self) -> ModuleState:
        """Return a copy for comparisons, with identities in place of tensors and modules."""
        tables = {name: {k: _noted(v) for k, v in held.items()} for name, held in self.tables.items()}
        return ModuleState(None, self.kind, {k: _noted(v) for k, v in self.attributes.items()}, tables)

    def changed(self, sharded: ModuleState, now: ModuleState) -> ModuleState:
        """Return this state, from before sharding, with the changes between `sharded` and `now` applied."""
        kind = self.kind if now.kind is sharded.kind else now.kind
        attributes = _merged(self.attributes, sharded.attributes, now.attributes)
        tables = {
            name: _merged(entries, sharded.tables.get(name, {}), now.tables.get(name, {}))
            for name, entries in self.tables.items()
            if name not in _BY_NAME
        }
        return ModuleState(self.module, kind, attributes, tables)


def _merged(before: Mapping[Any, Any], sharded: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    kept = {key: value for key, value in before.items() if key in now or key not in sharded}
    return kept | {key: value for key, value in now.items() if key not in sharded or not _is(value, sharded[key])}


class UnshardedModel:
    """State of a model before it is sharded, without its parameters.

    Example:
        >>> unsharded = UnshardedModel(model)
        >>> sharded(model)
        >>> unsharded.note_sharded(model)
        >>> with unsharded.restored(model, whole_parameters):
        ...     model(tokens)                          # on this rank alone
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: ModuleState.of(module) for name, module in model.named_modules()}
        for state in self._before.values():
            state.tables["_parameters"] = dict.fromkeys(state.tables["_parameters"])
        self._configs = {id(config): ModuleState.of(config) for config in _configs(model)}
        self._sharded: dict[str, ModuleState] = {}
        self._sharded_configs: dict[int, ModuleState] = {}

    def __reduce__(self) -> Any:
        return UnshardedModel, (nn.Module(),)  # a copy of the model has other modules

    def note_sharded(self, model: nn.Module) -> None:
        """Record the state of `model` after sharding."""
        self._sharded = {name: ModuleState.of(module).without_tensors() for name, module in model.named_modules()}
        for name, before in self._before.items():  # keep only buffers that the replacing layer lacks
            own = self._sharded[name].tables["_buffers"] if name in self._sharded else {}
            before.tables["_buffers"] = {k: None if k in own else v for k, v in before.tables["_buffers"].items()}
        self._sharded_configs = {id(config): ModuleState.of(config).without_tensors() for config in _configs(model)}

    def obstacle(self, model: nn.Module) -> str:
        """Return the reason why `model` cannot be restored to its unsharded state, or ""."""
        if not self._sharded:
            return "it is a copy of the model that parallelize returned"
        names = {name for name, _ in model.named_modules()}
        other = sorted(names.symmetric_difference(self._sharded) or names.symmetric_difference(self._before))
        return f"the modules {other[:3]} were added or removed after parallelize" if other else ""

    @contextmanager
    def restored(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which `model` is unsharded.

        Args:
            parameters: full tensors by name; tied parameters under each of their names.
        """
        now = {name: ModuleState.of(module) for name, module in model.named_modules()}
        device = next(iter(parameters.values())).device
        whole: list[ModuleState] = []
        for name, before in self._before.items():
            state = before.changed(self._sharded[name], now[name])
            prefix = f"{name}." if name else ""
            own = before.tables["_parameters"]
            state.tables["_parameters"] = {key: parameters.get(f"{prefix}{key}") for key in own}
            here = {key: _on(device, b) for key, b in before.tables["_buffers"].items()}
            state.tables["_buffers"] = here | now[name].tables["_buffers"]
            whole.append(state)
        for one, config in zip(_configs(model), self._configs.values(), strict=False):
            if (sharded := self._sharded_configs.get(id(one))) is not None:
                whole.append(config.changed(sharded, ModuleState.of(one)))
        held = [ModuleState.of(state.module) for state in whole]
        seen = {id(state.module) for state in whole}
        held += [state for state in now.values() if id(state.module) not in seen]
        try:
            for state in whole:
                state.apply()
            yield
        finally:
            for state in held:
                state.apply()


def _on(device: torch.device, buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.to(device)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs of the transformers models in `model`, each once."""
    found = (module.config for module in model.modules() if is_transformers_model(module))
    return [*{id(config): config for config in found}.values()]
