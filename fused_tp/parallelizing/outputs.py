"""Tensors in the output of a model's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_TENSORLESS_TYPES = (str, bytes, int, float, complex, torch.dtype, torch.device, type(None))
_SKIPPED_TYPES = (nn.Module, ModuleType, FunctionType, type)


def find_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in `output`, nested containers and other objects, each once, in a fixed order."""
    return list(iterate_tensors(output))


def iterate_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors that `find_tensors` returns."""
    return _search(output, set())


def iterate_numbers(output: Any) -> Iterator[int | float]:
    """Yield the Python numbers in `output` and in nested mappings, lists and tuples, in a fixed order."""
    if type(output) in (int, float):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for child in dict(output).values() if isinstance(output, Mapping) else output:
            yield from iterate_numbers(child)


def _search(value: Any, seen_ids: set[int]) -> Iterator[Tensor]:
    if id(value) in seen_ids or isinstance(value, (*_TENSORLESS_TYPES, *_SKIPPED_TYPES)):
        return
    seen_ids.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for child in _children(value):
        yield from _search(child, seen_ids)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return dict(value).values()  # dict(): a field of transformers' ModelOutput may hide the method "values"
    leaves = tree_leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return leaves
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    slots = (name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def map_tensors(function: Callable[[Tensor], Any], output: Any, *, cache_types: tuple[type, ...] = ()) -> Any:
    """Return `output`, nested tuples, lists and dicts, with every tensor replaced by `function(tensor)`.

    Args:
        cache_types: classes whose objects are returned unchanged.

    Raises:
        TypeError: `output` holds an object of another type with tensors, such as a dataclass or a subclass of dict;
            its tensors cannot be replaced.
    """

    def replace_tensor(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, cache_types) or not find_tensors(value):
            return value
        raise TypeError(
            f"forward returned a {type(value).__name__}, whose tensors cannot be replaced by tensors of the full "
            "sequence. Return a NamedTuple, tuple, list or dict, or register the class with torch.utils._pytree."
        )

    return tree_map(replace_tensor, output)
