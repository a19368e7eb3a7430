"""Which parameters a module's own code reads from the modules inside of it, as in `F.conv1d(x, self.conv1d.weight)`.

Such code finds the parameter without calling its owner, so what the owner's forward does with it (a DTensor becomes a
plain tensor, see `replicate_own`) must be done around the reader's forward too. Only the source of a class shows it:
attribute chains that begin at `self`. Where there is no source to read nothing is found.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, lru_cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn

# Methods that prepare weights, and attributes that need no values.
_PREPARE = ("__init__", "_init_weights", "extra_repr", "reset_parameters", "tie_weights", "_tie_weights")
_DESCRIBE = {"dtype", "device", "shape", "ndim", "requires_grad", "is_meta", "is_cuda"}


def parameters_read(module: nn.Module, *, by_forward: bool = False) -> list[str]:
    """Names, seen from `module`, of the parameters of modules inside of it that its code reads, and, where it calls
    methods of these other than forward, that their code reads.

    `by_forward`: only those that its own method `forward` reads; other methods may never be called.
    """
    kind: Any = type(module)
    found: set[str] = set()
    chains = _chains(kind, by_forward, _patches(kind)) if module._modules else frozenset()
    own = vars(module).get("forward")
    if module._modules and isinstance(own, (MethodType, FunctionType)):
        chains |= _chains_of_function(getattr(own, "__func__", own))
    for chain in chains:
        *owners, last = chain.split(".")
        owner: nn.Module | None = module
        for name in owners:
            owner = owner._modules.get(name) if owner is not None else None
        if owner is None:
            continue
        held = owner._modules.get(last)
        if owner is not module and not by_forward and inspect.isfunction(getattr(type(owner), last, None)):
            # A method of it, around which nothing is hooked.
            found.update(".".join((*owners, name)) for name in parameters_read(owner))
        elif isinstance(held, (nn.ParameterList, nn.ParameterDict)):
            found.update(f"{chain}.{name}" for name in held._parameters)
        elif owner is not module and owner._parameters.get(last) is not None:
            found.add(chain)
    return sorted(found)


@cache  # of classes
def _chains(kind: Any, by_forward: bool, patches: tuple[tuple[Any, str, FunctionType], ...]) -> frozenset[str]:
    """Every `a.b.c` of a `self.a.b.c` in the methods of a class and its bases."""
    found: set[str] = set()
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and (not base.__module__.startswith("torch.") or base is nn.MultiheadAttention):
            methods = dict(_chains_of(_source(base.__module__)).get(base.__qualname__, {}))
            methods |= {name: _chains_of_function(function) for of, name, function in patches if of is base}
            found.update(*([methods.get("forward", frozenset())] if by_forward else methods.values()))
    return frozenset(found)


def _patches(kind: Any) -> tuple[tuple[Any, str, FunctionType], ...]:
    """(class, name, function) of the methods of a class and its bases that its file does not define, as after
    `LlamaForCausalLM.forward = lce_forward`."""
    found = []
    for base in kind.__mro__:
        if not issubclass(base, nn.Module) or base.__module__.startswith("torch."):
            continue
        for name, method in vars(base).items():
            function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
            if isinstance(function, FunctionType) and name not in _PREPARE and function.__module__ != base.__module__:
                found.append((base, name, function))
    return tuple(found)


@cache
def _chains_of_function(function: FunctionType) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    return frozenset().union(*_chains_in(tree).values())


def _source(module: str) -> str:
    """As it is now: a module may be loaded again, and another one under its name."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


@lru_cache(maxsize=16)  # the classes of a model are those of few files
def _chains_of(source: str) -> dict[str, dict[str, frozenset[str]]]:
    """What `_chains` returns, by qualified names of the classes in a source and by methods.

    inspect.getsource parses the whole file anew for every class, which took most of the time of `parallelize`.
    """
    try:
        return {name: _chains_in(definition) for name, definition in _definitions(ast.parse(source), "")}
    except SyntaxError:
        return {}


def _chains_in(definition: ast.AST) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for method in ast.walk(definition):
        if isinstance(method, ast.FunctionDef) and method.name not in _PREPARE:
            read = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
            described = {id(node.value) for node in read if node.attr in _DESCRIBE}
            owners = {"self", *(a.arg for a in method.args.args[:1])}
            chains = {_chain(node, owners) for node in read if id(node) not in described}
            found[method.name] = found.get(method.name, frozenset()) | chains
    return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _definitions(child, f"{prefix}{child.name}.<locals>.")
        elif not isinstance(child, ast.expr):  # if, try, except
            yield from _definitions(child, prefix)


def _chain(node: ast.expr, owners: set[str]) -> str:
    """`a.b` of `self.a.b`, where "self" is in `owners`; "" of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id in owners else ""


def attentions_named(module: nn.Module) -> set[str]:
    """Names of attention implementations that code of `module` compares that of its config with, to do something else.
    A comparison with "eager" alone only tells whether to look the attention up."""
    found: set[str] = set()
    for kind in type(module).__mro__:
        if issubclass(kind, nn.Module) and not kind.__module__.startswith(("torch.", "transformers.modeling_utils")):
            found |= _attentions_in(_source(kind.__module__)).get(kind.__qualname__, frozenset())
    return found


@lru_cache(maxsize=16)
def _attentions_in(source: str) -> dict[str, frozenset[str]]:
    """What `attentions_named` returns, by qualified names of the classes in a source."""
    if "_attn_implementation" not in source:
        return {}
    return {name: frozenset(_compared(definition)) for name, definition in _definitions(ast.parse(source), "")}


def _compared(definition: ast.ClassDef) -> Iterator[str]:
    methods = (one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name not in _PREPARE)
    for node in (node for method in methods for node in ast.walk(method)):
        if not isinstance(node, ast.Compare):
            continue
        inside = list(ast.walk(node))
        names = {one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        reads = any(isinstance(one, ast.Attribute) and one.attr.endswith("_attn_implementation") for one in inside)
        if reads and names != {"eager"}:
            yield from names


_SPLITS = {"split", "chunk", "tensor_split", "split_with_sizes"}
_SAME = {"contiguous", "float", "to", "clone"}  # methods that keep a tensor's dims; others may have made one of heads


def splits_output(kind: Any, layer: str) -> str | None:
    """The function by which the methods of class `kind` take what `self.<layer>` has returned, itself or under a name,
    apart into a few names; None where they do not, or there is no source."""
    for definition in [d for k in kind.__mro__ for n, d in _parsed(_source(k.__module__)) if n == k.__qualname__]:
        for method in (node for node in ast.walk(definition) if isinstance(node, ast.FunctionDef)):
            called = f"{method.args.args[0].arg if method.args.args else 'self'}.{layer}"
            named: set[str] = set()
            assignments = (node for node in ast.walk(method) if isinstance(node, ast.Assign))
            for one in sorted(assignments, key=lambda node: node.lineno):
                target = one.targets[0]
                if isinstance(target, ast.Name):
                    made = _made_of(one.value, called, named)
                    named = named | {target.id} if made else named - {target.id}
                if not isinstance(target, ast.Tuple):
                    continue
                for node in ast.walk(one.value):
                    if (
                        isinstance(node, ast.Call)
                        and isinstance(node.func, ast.Attribute)
                        and node.func.attr in _SPLITS
                    ):
                        of_torch = ast.unparse(node.func.value) == "torch"
                        whole = node.args[0] if of_torch and node.args else node.func.value
                        if _made_of(whole, called, named):
                            return node.func.attr
    return None


def _made_of(node: ast.expr, called: str, named: set[str]) -> bool:
    """Whether an expression is a call of the layer `called`, or a name in `named`."""
    while isinstance(node, ast.Call):
        if ast.unparse(node.func) == called:
            return True
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _SAME:
            return False
        node = node.func.value
    return isinstance(node, ast.Name) and node.id in named


@lru_cache(maxsize=16)
def _parsed(source: str) -> list[tuple[str, ast.ClassDef]]:
    try:
        return list(_definitions(ast.parse(source), ""))
    except SyntaxError:
        return []


def forward_mentions(module: nn.Module, words: str, *, unknown: bool) -> bool:
    """Whether the source of the class's forward has `words`, or that of a base's which it calls by super(); `unknown`
    where there is no source to read."""
    for kind in type(module).__mro__:
        if "forward" not in vars(kind):
            continue
        try:
            source = inspect.getsource(vars(kind)["forward"])
        except (OSError, TypeError):
            return unknown
        if words in source or "super()" not in source:
            return words in source
    return unknown
