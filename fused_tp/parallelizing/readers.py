"""Find the parameters that a module's own code reads from its submodules, as in `F.conv1d(x, self.conv1d.weight)`.

Such code reads the parameter without calling the submodule that owns it. So the hooks around the owner's forward, which
convert a DTensor to a plain tensor (see `replicate_own`), must also be around the reader's forward. Reads are found in
the source of the reader's class, as attribute chains that begin at `self`. Without source nothing is found.
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

_BASES = ("torch.", "transformers.modeling_utils")  # modules of base classes; these read no submodule's parameters
# Methods that do not run in forward, and attributes of parameters that do not depend on the values.
_PREPARE = ("__init__", "_init_weights", "extra_repr", "reset_parameters", "tie_weights", "_tie_weights")
_DESCRIBE = {"dtype", "device", "shape", "ndim", "requires_grad", "is_meta", "is_cuda"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.ExceptHandler, ast.With)
_HOLD_CLASSES = (ast.ClassDef, *_FUNCTIONS, *_BRANCHES)


def parameters_read(module: nn.Module, *, by_forward: bool = False) -> list[str]:
    """Return the names, relative to `module`, of the submodule parameters that the code of `module` reads.

    If the code calls a method of a submodule other than forward, parameters that this submodule's code reads are
    included.

    Args:
        by_forward: include only parameters that the method `forward` reads; other methods may never be called.
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
            # The code calls a method of the submodule other than forward, around which no hooks run.
            found.update(".".join((*owners, name)) for name in parameters_read(owner))
        elif isinstance(held, (nn.ParameterList, nn.ParameterDict)):
            found.update(f"{chain}.{name}" for name in held._parameters)
        elif owner is not module and owner._parameters.get(last) is not None:
            found.add(chain)
    return sorted(found)


@cache  # by class
def _chains(kind: Any, by_forward: bool, patches: tuple[tuple[Any, str, FunctionType], ...]) -> frozenset[str]:
    """Return the chain `a.b.c` for every `self.a.b.c` in the methods of a class and its bases."""
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
    """Return (class, name, function) of each method of a class and its bases that is defined in another file.

    `LlamaForCausalLM.forward = lce_forward` makes such a method.
    """
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
    """Return the current source of a module. Not cached: the module may be reloaded or replaced."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def _chains_in(definition: ast.AST) -> dict[str, frozenset[str]]:
    """Return the attribute chains that begin at `self`, without `self`, by the name of the function that reads them."""
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
    """Return the definitions of a class in the source of its module; several if `if` branches define it."""
    return _classes_in(_source(kind.__module__)).get(kind.__qualname__, [])


@lru_cache(maxsize=16)  # the classes of one model are in a few files
def _classes_in(source: str) -> dict[str, list[ast.ClassDef]]:
    """Return the classes defined in `source`, by qualified name.

    Rejected: inspect.getsource of each class, which parses the file each time and took most of the time of
    `parallelize`.
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
    """Return the names of attention implementations that the code of `module` compares its config's with.

    A comparison with "eager" alone is ignored: it only decides whether to look up the attention function.
    """
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
_KEEP_DIMS = {"contiguous", "float", "to", "clone"}  # methods that keep a tensor's dims; others may split off heads


def splits_output(kind: Any, layer: str) -> str | None:
    """Return the name of the function by which methods of class `kind` split the output of `self.<layer>`.

    The output may be split directly or through a variable. Returns None if it is not split, or without source.
    """
    for definition in [definition for base in kind.__mro__ for definition in _definitions(base)]:
        for method in (node for node in ast.walk(definition) if isinstance(node, ast.FunctionDef)):
            called = f"{method.args.args[0].arg if method.args.args else 'self'}.{layer}"
            named: set[str] = set()
            assignments = (node for node in ast.walk(method) if isinstance(node, ast.Assign))
            for one in sorted(assignments, key=lambda node: node.lineno):
                target = one.targets[0]
                if isinstance(target, ast.Name):
                    is_output = _is_output_of(one.value, called, named)
                    named = named | {target.id} if is_output else named - {target.id}
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
                        if _is_output_of(whole, called, named):
                            return node.func.attr
    return None


def _is_output_of(node: ast.expr, called: str, named: set[str]) -> bool:
    """True if an expression is a call of the layer `called` or a name in `named`, followed by methods in _KEEP_DIMS."""
    while isinstance(node, ast.Call):
        if ast.unparse(node.func) == called:
            return True
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _KEEP_DIMS:
            return False
        node = node.func.value
    return isinstance(node, ast.Name) and node.id in named


def forward_mentions(module: nn.Module, words: str, *, unknown: bool) -> bool:
    """True if the source of the forward of `module`, or of a base's forward called by super(), contains `words`.

    Returns `unknown` without source.
    """
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
