"""Find the parameters that a module's own code reads from its submodules, as in `F.conv1d(x, self.conv1d.weight)`.

Such code reads the parameter without calling its owner, so the conversion around the owner's forward (a DTensor becomes
a plain tensor, see `replicate_own`) must also be around the reader's forward. Only the source of a class shows such
reads, as attribute chains that begin at `self`. Without source nothing is found.
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

_BASES = ("torch.", "transformers.modeling_utils")  # modules of base classes, which read no submodule's parameters
# Methods that prepare weights, and attributes that need no values.
_PREPARE = ("__init__", "_init_weights", "extra_repr", "reset_parameters", "tie_weights", "_tie_weights")
_DESCRIBE = {"dtype", "device", "shape", "ndim", "requires_grad", "is_meta", "is_cuda"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.ExceptHandler, ast.With)
_HOLD_CLASSES = (ast.ClassDef, *_FUNCTIONS, *_BRANCHES)


def parameters_read(module: nn.Module, *, by_forward: bool = False) -> list[str]:
    """Names, relative to `module`, of the submodule parameters that its code reads; also those that the code of
    submodules reads, if it calls their methods other than forward.

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
            # The code calls a method of the submodule, which has no hooks around it.
            found.update(".".join((*owners, name)) for name in parameters_read(owner))
        elif isinstance(held, (nn.ParameterList, nn.ParameterDict)):
            found.update(f"{chain}.{name}" for name in held._parameters)
        elif owner is not module and owner._parameters.get(last) is not None:
            found.add(chain)
    return sorted(found)


@cache  # by class
def _chains(kind: Any, by_forward: bool, patches: tuple[tuple[Any, str, FunctionType], ...]) -> frozenset[str]:
    """Every `a.b.c` of a `self.a.b.c` in the methods of a class and its bases."""
    found: set[str] = set()
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and (not base.__module__.startswith(_BASES) or base is nn.MultiheadAttention):
            methods: dict[str, frozenset[str]] = {}
            for definition in _definitions(base):
                methods |= _chains_in(definition)
            methods |= {name: _chains_of_function(function) for of, name, function in patches if of is base}
            found.update(*([methods.get("forward", frozenset())] if by_forward else methods.values()))
    return frozenset(found)


def _patches(kind: Any) -> tuple[tuple[Any, str, FunctionType], ...]:
    """Return (class, name, function) of the methods of a class and its bases that come from another file, as after
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
    """Current source of a module. Not cached: the module may be reloaded, or replaced under the same name."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def _chains_in(definition: ast.AST) -> dict[str, frozenset[str]]:
    """Attribute chains that begin at `self`, without it, by the name of the function that reads them."""
    found: dict[str, frozenset[str]] = {}
    for method in ast.walk(definition):
        if isinstance(method, ast.FunctionDef) and method.name not in _PREPARE:
            read = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
            described = {id(node.value) for node in read if node.attr in _DESCRIBE}
            owners = ["self", *[argument.arg for argument in method.args.args[:1]]]
            chains: set[str] = set()
            for node in read:
                parts: list[str] = []
                start: ast.expr = node
                while isinstance(start, ast.Attribute):
                    parts.append(start.attr)
                    start = start.value
                if isinstance(start, ast.Name) and start.id in owners and id(node) not in described:
                    chains.add(".".join(reversed(parts)))
            found[method.name] = found.get(method.name, frozenset()) | chains
    return found


def _definitions(kind: type) -> list[ast.ClassDef]:
    """Definitions of a class in the source of its module; several if branches define it."""
    return _classes_in(_source(kind.__module__)).get(kind.__qualname__, [])


@lru_cache(maxsize=16)  # the classes of a model are in few files
def _classes_in(source: str) -> dict[str, list[ast.ClassDef]]:
    """Classes defined in a source, by qualified name.

    inspect.getsource of a class parses the whole file each time, which took most of the time of `parallelize`.
    """
    found: dict[str, list[ast.ClassDef]] = {}
    try:
        waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    except SyntaxError:
        return found
    while waiting:
        prefix, node = waiting.pop()
        inside = prefix
        if isinstance(node, ast.ClassDef):
            found.setdefault(prefix + node.name, []).append(node)
            inside = f"{prefix}{node.name}."
        elif isinstance(node, _FUNCTIONS):
            inside = f"{prefix}{node.name}.<locals>."
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _HOLD_CLASSES):
                waiting.append((inside, child))
    return found


def attentions_named(module: nn.Module) -> set[str]:
    """Names of attention implementations for which code of `module` behaves differently: it compares its config's with
    them. A comparison with "eager" alone does not count: it only decides whether to look the attention up."""
    found: set[str] = set()
    for kind in type(module).__mro__:
        of_model = issubclass(kind, nn.Module) and not kind.__module__.startswith(_BASES)
        if of_model and "_attn_implementation" in _source(kind.__module__):
            found.update(*(_compared(definition) for definition in _definitions(kind)))
    return found


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
_SAME = {"contiguous", "float", "to", "clone"}  # methods that keep a tensor's dims; others may add one of heads


def splits_output(kind: Any, layer: str) -> str | None:
    """Name of the function by which methods of class `kind` unpack the output of `self.<layer>`, directly or through a
    variable; None if they do not unpack it, or without source."""
    for definition in [definition for base in kind.__mro__ for definition in _definitions(base)]:
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
    """True if an expression is a call of the layer `called` or a name in `named`, also behind methods in _SAME."""
    while isinstance(node, ast.Call):
        if ast.unparse(node.func) == called:
            return True
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _SAME:
            return False
        node = node.func.value
    return isinstance(node, ast.Name) and node.id in named


def forward_mentions(module: nn.Module, words: str, *, unknown: bool) -> bool:
    """True if the source of the class's forward, or of a base's that it calls by super(), contains `words`; `unknown`
    without source."""
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
