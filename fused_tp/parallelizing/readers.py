"""Find the parameters that a module's own code reads from its submodules, as in `F.conv1d(x, self.conv1d.weight)`.

Such code reads the parameter without calling the submodule that owns it. So the hooks around the owner's forward, which
convert a DTensor to a plain tensor (see `replicate_own_parameters`), must also be around the reader's forward. Reads
are found in the source of the reader's class, as attribute chains that begin at `self`. If the source is not
available, none are found.
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

# Prefixes of the Python modules of library classes, whose methods do not read parameters of submodules.
_LIBRARY_MODULES = ("torch.", "transformers.modeling_utils")
# Methods that do not run in forward, and attributes of parameters that do not depend on the values.
_SETUP_METHODS = ("__init__", "_init_weights", "extra_repr", "reset_parameters", "tie_weights", "_tie_weights")
_METADATA_ATTRIBUTES = {"dtype", "device", "shape", "ndim", "requires_grad", "is_meta", "is_cuda"}
_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCH_NODES = (ast.If, ast.Try, ast.ExceptHandler, ast.With)
_SCOPE_NODES = (ast.ClassDef, *_FUNCTION_NODES, *_BRANCH_NODES)


def find_read_parameters(module: nn.Module, *, forward_only: bool = False) -> list[str]:
    """Return the names, relative to `module`, of the submodule parameters that the code of `module` reads.

    If the code calls a method of a submodule other than forward, parameters that this submodule's code reads are
    included.

    Args:
        forward_only: include only parameters that the method `forward` reads; other methods may never be called.
    """
    module_class: Any = type(module)
    names: set[str] = set()
    chains = (
        _attribute_chains(module_class, forward_only, _patched_methods(module_class))
        if module._modules
        else frozenset()
    )
    instance_forward = vars(module).get("forward")
    if module._modules and isinstance(instance_forward, (MethodType, FunctionType)):
        chains |= _function_chains(getattr(instance_forward, "__func__", instance_forward))
    for chain in chains:
        *owners, last_name = chain.split(".")
        owner: nn.Module | None = module
        for name in owners:
            owner = owner._modules.get(name) if owner is not None else None
        if owner is None:
            continue
        container = owner._modules.get(last_name)
        if owner is not module and not forward_only and inspect.isfunction(getattr(type(owner), last_name, None)):
            # The code calls a method of the submodule other than forward, around which no hooks run.
            names.update(".".join((*owners, name)) for name in find_read_parameters(owner))
        elif isinstance(container, (nn.ParameterList, nn.ParameterDict)):
            names.update(f"{chain}.{name}" for name in container._parameters)
        elif owner is not module and owner._parameters.get(last_name) is not None:
            names.add(chain)
    return sorted(names)


@cache  # a model has many modules of one class, and parsing the source of its methods is slow
def _attribute_chains(
    module_class: Any, forward_only: bool, patches: tuple[tuple[Any, str, FunctionType], ...]
) -> frozenset[str]:
    """Return the chain `a.b.c` for every `self.a.b.c` in the methods of a class and its bases."""
    chains: set[str] = set()
    for base in module_class.__mro__:
        if issubclass(base, nn.Module) and (
            not base.__module__.startswith(_LIBRARY_MODULES) or base is nn.MultiheadAttention
        ):
            methods: dict[str, frozenset[str]] = {}
            for definition in _class_definitions(base):
                methods |= _chains_by_method(definition)
            methods |= {
                name: _function_chains(function) for patched_class, name, function in patches if patched_class is base
            }
            chains.update(*([methods.get("forward", frozenset())] if forward_only else methods.values()))
    return frozenset(chains)


def _patched_methods(module_class: Any) -> tuple[tuple[Any, str, FunctionType], ...]:
    """Return (class, name, function) of each method of a class and its bases that is defined in another file.

    `LlamaForCausalLM.forward = lce_forward` makes such a method.
    """
    patches = []
    for base in module_class.__mro__:
        if not issubclass(base, nn.Module) or base.__module__.startswith("torch."):
            continue
        for name, method in vars(base).items():
            function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
            if (
                isinstance(function, FunctionType)
                and name not in _SETUP_METHODS
                and function.__module__ != base.__module__
            ):
                patches.append((base, name, function))
    return tuple(patches)


@cache
def _function_chains(function: FunctionType) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    return frozenset().union(*_chains_by_method(tree).values())


def _read_source(module_name: str) -> str:
    """Return the current source of a module. Not cached: the module may be reloaded or replaced."""
    try:
        return inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return ""


def _chains_by_method(definition: ast.AST) -> dict[str, frozenset[str]]:
    """Return the attribute chains that begin at `self`, without `self`, by the name of the function that reads them."""
    chains_by_name: dict[str, frozenset[str]] = {}
    for method in ast.walk(definition):
        if isinstance(method, ast.FunctionDef) and method.name not in _SETUP_METHODS:
            attributes = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
            metadata_owners = {id(node.value) for node in attributes if node.attr in _METADATA_ATTRIBUTES}
            self_names = ["self", *[argument.arg for argument in method.args.args[:1]]]
            chains: set[str] = set()
            for node in attributes:
                components: list[str] = []
                base: ast.expr = node
                while isinstance(base, ast.Attribute):
                    components.append(base.attr)
                    base = base.value
                if isinstance(base, ast.Name) and base.id in self_names and id(node) not in metadata_owners:
                    chains.add(".".join(reversed(components)))
            chains_by_name[method.name] = chains_by_name.get(method.name, frozenset()) | chains
    return chains_by_name


def _class_definitions(module_class: type) -> list[ast.ClassDef]:
    """Return the definitions of a class in the source of its module; several if `if` branches define it."""
    return _classes_by_name(_read_source(module_class.__module__)).get(module_class.__qualname__, [])


@lru_cache(maxsize=16)  # the classes of one model are in a few files
def _classes_by_name(source: str) -> dict[str, list[ast.ClassDef]]:
    """Return the classes defined in `source`, by qualified name.

    Rejected: inspect.getsource of each class, which parses the file each time and took most of the time of
    `parallelize`.
    """
    definitions: dict[str, list[ast.ClassDef]] = {}
    try:
        pending_nodes: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    except SyntaxError:
        return definitions
    while pending_nodes:
        prefix, node = pending_nodes.pop()
        scope = prefix
        if isinstance(node, ast.ClassDef):
            definitions.setdefault(prefix + node.name, []).append(node)
            scope = f"{prefix}{node.name}."
        elif isinstance(node, _FUNCTION_NODES):
            scope = f"{prefix}{node.name}.<locals>."
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _SCOPE_NODES):
                pending_nodes.append((scope, child))
    return definitions


def compared_attention_names(module: nn.Module) -> set[str]:
    """Return the names of attention implementations that the code of `module` compares its config's with.

    A comparison with "eager" alone is ignored: it only decides whether to look up the attention function.
    """
    names: set[str] = set()
    for base in type(module).__mro__:
        is_model_code = issubclass(base, nn.Module) and not base.__module__.startswith(_LIBRARY_MODULES)
        if is_model_code and "_attn_implementation" in _read_source(base.__module__):
            names.update(*(_compared_names(definition) for definition in _class_definitions(base)))
    return names


def _compared_names(definition: ast.ClassDef) -> Iterator[str]:
    methods = (
        item for item in definition.body if isinstance(item, ast.FunctionDef) and item.name not in _SETUP_METHODS
    )
    for node in (node for method in methods for node in ast.walk(method)):
        if not isinstance(node, ast.Compare):
            continue
        operands = list(ast.walk(node))
        names = {item.value for item in operands if isinstance(item, ast.Constant) and isinstance(item.value, str)}
        reads_implementation = any(
            isinstance(item, ast.Attribute) and item.attr.endswith("_attn_implementation") for item in operands
        )
        if reads_implementation and names != {"eager"}:
            yield from names


_SPLIT_METHODS = {"split", "chunk", "tensor_split", "split_with_sizes"}
# Methods that keep a tensor's shape. Others, such as view, may split the last dim into heads.
_DIM_PRESERVING_METHODS = {"contiguous", "float", "to", "clone"}


def find_output_split(module_class: Any, layer: str) -> str | None:
    """Return the name of the function by which methods of class `module_class` split the output of `self.<layer>`.

    The output may be split directly or through a variable. Returns None if it is not split, or without source.
    """
    for definition in [definition for base in module_class.__mro__ for definition in _class_definitions(base)]:
        for method in (node for node in ast.walk(definition) if isinstance(node, ast.FunctionDef)):
            layer_call = f"{method.args.args[0].arg if method.args.args else 'self'}.{layer}"
            variables: set[str] = set()
            assignments = (node for node in ast.walk(method) if isinstance(node, ast.Assign))
            for assignment in sorted(assignments, key=lambda node: node.lineno):
                target = assignment.targets[0]
                if isinstance(target, ast.Name):
                    is_output = _is_layer_output(assignment.value, layer_call, variables)
                    variables = variables | {target.id} if is_output else variables - {target.id}
                if not isinstance(target, ast.Tuple):
                    continue
                for node in ast.walk(assignment.value):
                    if (
                        isinstance(node, ast.Call)
                        and isinstance(node.func, ast.Attribute)
                        and node.func.attr in _SPLIT_METHODS
                    ):
                        is_torch_function = ast.unparse(node.func.value) == "torch"
                        split_value = node.args[0] if is_torch_function and node.args else node.func.value
                        if _is_layer_output(split_value, layer_call, variables):
                            return node.func.attr
    return None


def _is_layer_output(node: ast.expr, layer_call: str, variables: set[str]) -> bool:
    """True if `node` is a call `layer_call` or one of `variables`, followed by methods in _DIM_PRESERVING_METHODS."""
    while isinstance(node, ast.Call):
        if ast.unparse(node.func) == layer_call:
            return True
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _DIM_PRESERVING_METHODS:
            return False
        node = node.func.value
    return isinstance(node, ast.Name) and node.id in variables


def forward_source_contains(module: nn.Module, text: str, *, default: bool) -> bool:
    """True if the source of the forward of `module`, or of a base's forward called by super(), contains `text`.

    Returns `default` without source.
    """
    for base in type(module).__mro__:
        if "forward" not in vars(base):
            continue
        try:
            source = inspect.getsource(vars(base)["forward"])
        except (OSError, TypeError):
            return default
        if text in source or "super()" not in source:
            return text in source
    return default
