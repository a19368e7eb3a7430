"""Skip the repeated blocks of a large model in a comparison: of equal blocks, the first two run.

Blocks are the entries of an outermost nn.ModuleList or nn.Sequential. Two blocks are equal if their modules agree in
class, callers' code, style in the plan, attributes (except the index of the block), values of buffers and gates, and
names, shapes and dtypes of parameters. A block is skipped only if the equal blocks that have run returned one tensor
with the shape and dtype of their first argument; it then returns its own first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fused_tp.parallelizing.checks.model_check import callers_code
from fused_tp.parallelizing.checks.unsharded import MODULE_DICTS
from fused_tp.parallelizing.outputs import find_tensors

_RUN_OF_EACH_KIND = 2
_MAX_BUFFER_ELEMENTS = 4096  # values of larger buffers are not compared; their blocks count as different
_PLAIN_VALUES = (str, bytes, int, float, complex, bool, type(None))


class NotSkippableError(Exception):
    """A sharded block returns another shape than its input, so that those which equal it cannot be skipped."""


class RepeatedBlocks:
    """The repeated blocks of `model`, and those that a run of it has skipped.

    Args:
        styles: styles of the plan, by name of the module or parameter.

    Attributes:
        representatives: for each repeated block, the names of the equal blocks that run.
        skipped: names of the blocks that the unsharded model has skipped; True if they return a tuple of one tensor.
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, object]) -> None:
        self.representatives: dict[str, tuple[str, ...]] = {}
        self.skipped: dict[str, bool] = {}
        for path, container in _outermost_containers(model):
            kinds: dict[object, tuple[str, ...]] = {}
            for index, (key, block) in enumerate(container.named_children()):
                name = f"{path}.{key}".lstrip(".")
                kind = _kind(block, name, index, styles)
                names = kinds.get(kind, ())
                if len(names) < _RUN_OF_EACH_KIND:
                    kinds[kind] = (*names, name)
                elif any(True for _ in block.children()):  # a single layer may return another shape once it is sharded
                    self.representatives[name] = names

    @contextmanager
    def skipping(self, model: nn.Module) -> Iterator[None]:
        """Context in which the unsharded model skips repeated blocks; `skipped` lists them."""
        self.skipped = {}
        forms: dict[str, bool | None] = {}  # of blocks that have run

        def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            forms[name] = _output_form(args, kwargs, output)

        def forward(name: str, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            is_tuple = {forms.get(one) for one in self.representatives[name]}
            if len(is_tuple) != 1 or None in is_tuple:
                return own_forward(*args, **kwargs)
            self.skipped[name] = bool(*is_tuple)
            return _first_argument(self.skipped[name], *args, **kwargs)

        blocks = {name: model.get_submodule(name) for name in self.representatives}
        with (
            self._hooked([model], record),
            _replaced_forwards({block: partial(forward, name, block.forward) for name, block in blocks.items()}),
        ):
            yield

    @contextmanager
    def skipping_as_before(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Context in which the sharded `models` skip the same blocks.

        Raises:
            NotSkippableError: raised in forward, by an equal block that is sharded differently from what it returns.
        """

        def check(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if _output_form(args, kwargs, output) is None:
                raise NotSkippableError(f"{name!r} returns a shard of another shape than its input")

        blocks = {
            module: partial(_first_argument, self.skipped[name])
            for model in models
            for name, module in model.named_modules()
            if name in self.skipped and not isinstance(module, nn.Identity)
        }
        with self._hooked(models if self.skipped else (), check), _replaced_forwards(blocks):
            yield

    @contextmanager
    def _hooked(self, models: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
        """Context in which `hook(name, module, args, kwargs, output)` runs after each representative."""
        names = {name for several in self.representatives.values() for name in several}
        handles = [
            module.register_forward_hook(partial(hook, name), with_kwargs=True)
            for model in models
            for name, module in model.named_modules()
            if name in names and not isinstance(module, nn.Identity)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _outermost_containers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost_containers(child, f"{path}.{name}".lstrip("."))


def _output_form(args: Any, kwargs: Any, output: Any) -> bool | None:
    """True if `output` is a tuple of one tensor like the first argument, False for such a tensor; else None."""
    first = next(iter(find_tensors((args, kwargs))), None)
    is_tuple = isinstance(output, tuple) and len(output) == 1
    t = output[0] if is_tuple else output
    if first is None or not isinstance(t, Tensor) or (t.shape, t.dtype) != (first.shape, first.dtype):
        return None
    return is_tuple


def _first_argument(is_tuple: bool, *args: Any, **kwargs: Any) -> Any:
    first = find_tensors((args, kwargs))[0]
    return (first,) if is_tuple else first


@contextmanager
def _replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    replaced = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]
            if module in replaced:
                vars(module)["forward"] = replaced[module]


def _kind(block: nn.Module, path: str, index: int, styles: Mapping[str, object]) -> object:
    """Return a key that equal blocks share."""
    modules = []
    for name, module in block.named_modules():
        prefix = f"{path}.{name}".rstrip(".")
        attributes = {key: value for key, value in vars(module).items() if key not in MODULE_DICTS}
        hooks = [
            [*map(id, vars(module)[key].values())]
            for key in sorted(MODULE_DICTS)
            if "hooks" in key and isinstance(vars(module).get(key), dict)
        ]
        parameters = [
            (key, p if p is None else (p.shape, p.dtype, p.requires_grad, _value(p, 1), _style(styles, prefix, key)))
            for key, p in module._parameters.items()
        ]
        buffers = [(key, b if b is None else _value(b, _MAX_BUFFER_ELEMENTS)) for key, b in module._buffers.items()]
        code = {key: id(value) for key, value in callers_code(module).items()}
        named_attributes = [(key, _attribute(value, index)) for key, value in attributes.items()]
        modules.append((name, type(module), code, hooks, parameters, buffers, named_attributes, _style(styles, prefix)))
    return repr(modules)


def _style(styles: Mapping[str, object], *names: str) -> object:
    style = styles.get(".".join(filter(None, names)))
    return style if isinstance(style, _PLAIN_VALUES) else (type(style), vars(style))


def _attribute(value: Any, index: int) -> object:
    """Return a description of an attribute; objects are equal if they are the same."""
    if type(value) is int and value == index:
        return "index"
    if isinstance(value, (list, tuple)):
        return type(value), [_attribute(item, index) for item in value]
    if isinstance(value, dict):
        return type(value), [(_attribute(key, index), _attribute(item, index)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(_attribute(item, index)) for item in value)
    if isinstance(value, Tensor):
        return _value(value, _MAX_BUFFER_ELEMENTS)
    return value if isinstance(value, _PLAIN_VALUES) else (type(value), id(value))


def _value(t: Tensor, most_elements: int) -> object:
    """Return shape, dtype and values of `t`; its identity in place of values if it has more than `most_elements`."""
    if t.numel() > most_elements:
        return t.shape, t.dtype, id(t) if most_elements > 1 else ""
    return t.shape, t.dtype, "" if t.is_meta else t.detach().cpu().tolist()
