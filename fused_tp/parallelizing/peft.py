"""LoRA adapters of PEFT (arXiv:2106.09685) on the layers of a parallel model.

A LoRA layer adds B(A(x)) to the output of its base layer. One of A and B is sharded like the base, so that only rank-r
tensors are communicated:

| base layer | A [r, in]        | B [out, r]        | communicated                         | with sequence parallelism |
|------------|------------------|-------------------|--------------------------------------|---------------------------|
| column     | replicated       | sharded along out | backward: the sum of A(x)'s gradient | A(x), gathered            |
| row        | sharded along in | replicated        | the sum of A(x)                      | A(x), reduce-scattered    |
| replicated | replicated       | replicated        | nothing                              | nothing                   |

PEFT's own code adds, scales, merges, switches and loads adapters; parameters have the same names and shapes as in a
model on one rank. LoRA layers, and copies in `modules_to_save`, are removed from the model while it is checked and
sharded, so that plans contain the names of the model without adapters.

    # before: with adapters from get_peft_model, PeftModel.from_pretrained or model.add_adapter
    parallelize(peft_model, mesh)

    # after: on a parallel model, which may have come from the meta device
    peft_model = get_peft_model(model, parallel_config(model, LoraConfig(...)))
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear
from fused_tp.nn.checkpoint import gather_tensors
from fused_tp.nn.sharding import plain_parameters_
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE, SHARDING_ATTRIBUTE
from fused_tp.parallelizing.checks.model_check import check_equal_models
from fused_tp.parallelizing.layers import Sharding, replicate_module, resolve_stand_in, shard_layer
from fused_tp.parallelizing.readers import find_read_parameters
from fused_tp.parallelizing.shard_plan import ShardingPlan, Style, find_unread_parameters, spec_of

if TYPE_CHECKING:
    from fused_tp.nn.sharding import Memo

Config = TypeVar("Config", bound=LoraConfig)

# Attribute of a PEFT wrapper that holds the model's own module.
_BASE_ATTRIBUTES = {BaseTunerLayer: "base_layer", AuxiliaryTrainingWrapper: "original_module"}
_WRAPPER_TYPES = tuple(_BASE_ATTRIBUTES)
# Fields of a LoraConfig that request more than LoRA on linear layers.
_UNSUPPORTED_FIELDS = ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")


def base_model(model: PeftModel) -> nn.Module:
    """Return the model inside a PeftModel, to be parallelized.

    Raises:
        ValueError: the PeftModel has other adapters than LoRA, such as a learned prompt.
    """
    adapter_types = {name: str(config.peft_type.value) for name, config in model.peft_config.items()}
    other_name = next((name for name, adapter_type in adapter_types.items() if adapter_type != "LORA"), None)
    if other_name is not None:
        raise ValueError(
            f"The adapter {other_name!r} has the type {adapter_types[other_name]}; parallelize supports LORA only. "
            "Remove the adapter before parallelize: use unload(), or get_base_model() for prompts."
        )
    base: nn.Module = model.get_base_model()
    return base


class Adapters:
    """PEFT's wrappers in a model.

    Raises:
        ValueError: a wrapper is not supported; nothing has been changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.wrappers = {name: module for name, module in model.named_modules() if isinstance(module, _WRAPPER_TYPES)}
        for name, wrapper in self.wrappers.items():
            _check_wrapper(name, wrapper)

    @contextmanager
    def without_wrappers(self) -> Iterator[None]:
        """Context manager in which the wrapped modules take the place of the wrappers in the model.

        On exit the wrappers are put back, around the modules that have replaced the wrapped ones meanwhile.
        """
        references = [
            (parent, key, child)
            for parent in self.model.modules()
            for key, child in parent._modules.items()
            if isinstance(child, _WRAPPER_TYPES)
        ]
        for parent, key, wrapper in references:
            parent._modules[key] = wrapper._modules[_base_key(wrapper)]
        for _, _, wrapper in references:
            wrapper._modules[_base_key(wrapper)] = None  # otherwise it would keep the replaced full weight in memory
        try:
            yield
        finally:
            for parent, key, wrapper in references:
                wrapper._modules[_base_key(wrapper)] = parent._modules[key]
                parent._modules[key] = wrapper

    def check(self, whole_blocks: Collection[str]) -> None:
        """Check that wrapped modules are used by calls only. Call it inside `without_wrappers`.

        Raises:
            ValueError: another module's forward reads the parameters of a wrapped module; or a wrapped module is a
                block that runs on the full sequence.
        """
        for name in self.wrappers:
            _check_not_whole_block(name, whole_blocks)
        unread_names = find_unread_parameters(self.model)
        for name, module in self.model.named_modules() if self.wrappers else ():
            for parameter in find_read_parameters(module):
                path = f"{name}.{parameter}".lstrip(".")
                owner = path.rpartition(".")[0]
                if owner in self.wrappers and path not in unread_names:
                    raise ValueError(
                        f"{type(module).__name__} ({name!r}) reads {parameter!r} directly, so the PEFT adapter of "
                        f"{owner!r} would not be used. Remove {owner!r} from the LoraConfig."
                    )

    def make_plan(self, plan: ShardingPlan) -> ShardingPlan:
        """Return the plan for the modules that the wrappers add to a model with `plan`.

        Raises:
            ValueError: a wrapped module has a torch ParallelStyle, which does not define how to shard adapters.
        """
        styles: dict[str, Style] = {}
        for name, wrapper in self.wrappers.items():
            style = plan.modules.get(name)
            if isinstance(style, ParallelStyle):
                raise ValueError(
                    f"{name!r} has a PEFT adapter and a ParallelStyle in the plan, which does not specify how to shard "
                    "the adapter. Use the name of a style, such as 'colwise'."
                )
            for key, _ in _added_modules(wrapper):
                adapter_style = _adapter_style(key, style)
                if adapter_style is not None:
                    styles[f"{name}.{key}"] = adapter_style
        return ShardingPlan(styles)

    def shard(self, sharding: Sharding, memo: Memo) -> None:
        """Shard the modules that the wrappers add. Call it after `without_wrappers`."""
        for name, wrapper in self.wrappers.items():
            adapter_sharding = AdapterSharding(name, sharding)
            if isinstance(wrapper, Linear):
                wrapper.__class__ = ParallelLoraLinear
                wrapper.adapter_sharding = adapter_sharding
            for key, module in _added_modules(wrapper):
                wrapper.set_submodule(key, adapter_sharding.shard(key, module, memo))


@dataclass(frozen=True)
class AdapterSharding:
    """Name of a wrapper in a parallel model, and the model's sharding."""

    name: str
    sharding: Sharding

    def shard(self, key: str, module: nn.Module, memo: Memo) -> nn.Module:
        """Return the sharded or replicated counterpart of `module`, which the wrapper adds at `key`."""
        style = _adapter_style(key, self.sharding.plan.modules.get(self.name))
        # A copy in modules_to_save has the same input as the wrapped module, so it is sharded under that module's name.
        name = f"{self.name}.{key}" if key.startswith("lora_") else self.name
        if isinstance(style, str):
            module = shard_layer(name, module, style, self.sharding, memo)
        replicate_module(name, module, spec_of(style), self.sharding, memo)
        return module


class ParallelLoraLinear(Linear):
    """PEFT's LoRA layer around a sharded or replicated layer of a parallel model.

    PEFT checks that the class name contains "Linear".
    """

    adapter_sharding: AdapterSharding

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **keywords: Any) -> None:
        """Add an adapter, as PEFT does, and shard it.

        Raises:
            ValueError: the config requests more than LoRA on linear layers; low_cpu_mem_usage=True.
            RankMismatchError: the ranks have drawn different initial values.
        """
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **keywords)
        sharding = self.adapter_sharding.sharding
        if any(p.is_meta for p in self.lora_A[adapter_name].parameters()):
            raise ValueError("Adapters on the meta device are not supported. Omit low_cpu_mem_usage=True.")
        added_modules = {key: module for key, module in _added_modules(self) if key.endswith(f".{adapter_name}")}
        check_equal_models(nn.ModuleList(added_modules.values()), sharding.meshes)
        memo: Memo = WeakIdKeyDictionary()
        for key, module in added_modules.items():
            layer = self.adapter_sharding.shard(key, module, memo)
            self.set_submodule(key, layer)
            sharding.sequence.add_layer(f"{self.adapter_sharding.name}.{key}", layer)
        if sharding.has_plain_parameters:
            plain_parameters_(self)
        for module in self.modules():
            setattr(module, PARALLELISM_ATTRIBUTE, sharding.sequence.parallelism)
        if sharding.sequence.head in (self, self.base_layer):
            sharding.sequence.set_head(self)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features  # sizes of the unsharded layer

    def _cast_input_dtype(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # In attention modules, x may be a stand-in for the shard. The base layer replaces it in a hook; A needs this.
        cast: Tensor = super()._cast_input_dtype(resolve_stand_in(x), dtype)
        return cast

    def _mixed_batch_forward(self, x: Tensor, *args: Any, adapter_names: list[str], **keywords: Any) -> Tensor:
        """Apply each row's adapter. Adapters run in sorted order, because PEFT's order of a set differs over ranks."""
        result: Tensor = self.base_layer(x, *args)
        for name in sorted(set(adapter_names) & self.lora_A.keys()):
            rows = torch.tensor(
                [i for i, row_name in enumerate(adapter_names) if row_name == name], dtype=torch.int64, device=x.device
            )
            inputs = self.lora_dropout[name](resolve_stand_in(x)[rows].to(self.lora_A[name].weight.dtype))
            adapter_output = self.lora_B[name](self.lora_A[name](inputs)) * self.scaling[name]
            result = result.index_add(0, rows, adapter_output.to(result.dtype))
        return result


def parallel_config(model: nn.Module, config: Config) -> Config:
    """Prepare `config` so that PEFT puts adapters on the layers of `model`, which `parallelize` returned.

    All ranks must add adapters together, with equal random states.

    Raises:
        TypeError: `model` is not parallel.
        ValueError: the config requests more than LoRA on linear layers.

    Example:
        >>> parallelize(model, mesh)
        >>> peft_model = get_peft_model(model, parallel_config(model, LoraConfig(target_modules="all-linear")))
        >>> config = parallel_config(model, LoraConfig.from_pretrained(folder))     # or one that was saved
        >>> peft_model = PeftModel.from_pretrained(model, folder, config=config)
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not hasattr(base, SHARDING_ATTRIBUTE):
        raise TypeError("model is not parallel. Use PEFT's get_peft_model(model, config) directly.")
    check_config(config)
    sharding: Sharding | None = getattr(base, SHARDING_ATTRIBUTE)
    if sharding is not None:
        if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
            config.target_modules = _linear_layers(base)
        config._register_custom_module({nn.Module: _LoraLayerFactory(sharding)})
    return config


def _linear_layers(model: Any) -> set[str]:
    """Return the names of all linear layers but the output layer, including layers that have adapters already."""
    linear_classes = (nn.Linear, Linear)
    wrappers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, _WRAPPER_TYPES))
    linears = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, linear_classes) and not name.startswith(wrappers)
    ]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {name for name, module in linears if module is not head}


class _LoraLayerFactory:
    """Function object that creates the LoRA layers of a parallel model; PEFT calls it."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding

    def __call__(self, base: nn.Module, adapter_name: str, config: LoraConfig, **keywords: Any) -> ParallelLoraLinear:
        name: str = keywords["target_name"]
        is_plain_linear = isinstance(base, nn.Linear) and type(base).__name__ == "Linear"
        if not (is_plain_linear or type(base) in (ColumnParallelLinear, RowParallelLinear)):
            raise ValueError(
                f"{name!r} is a {type(base).__name__}; {_ONLY_LINEAR} Remove {name!r} from target_modules."
            )
        _check_not_whole_block(name, self.sharding.sequence.whole_blocks)
        layer = ParallelLoraLinear.__new__(ParallelLoraLinear)
        layer.adapter_sharding = AdapterSharding(name, self.sharding)  # read by `update_layer`, which __init__ calls
        Linear.__init__(layer, base, adapter_name, config, **keywords)
        return layer


def save_pretrained(model: PeftModel, save_directory: str, *args: Any, **keywords: Any) -> None:
    """Save a PeftModel of a parallel model to the same files as on one rank.

    All ranks must call it; global rank 0 gathers the adapters on the CPU and writes them. `parallelize` makes this
    function the `save_pretrained` of a PeftModel.
    """
    bound_arguments = inspect.signature(type(model).save_pretrained).bind(model, save_directory, *args, **keywords)
    keyword_values = bound_arguments.arguments.setdefault("kwargs", {})
    writes = bound_arguments.arguments.get("is_main_process", True)
    base: Any = model.get_base_model()
    has_embeddings = hasattr(base, "get_output_embeddings")  # a transformers model, whose embeddings PEFT may write
    layers = [base.get_input_embeddings(), base.get_output_embeddings()] if has_embeddings else [None]
    if keyword_values.get("state_dict") is None:
        embeddings = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
        saved_tensors = {
            name: t
            for name, t in model.state_dict(keep_vars=True).items()
            if "lora_" in name or "modules_to_save." in name or name.endswith("bias") or id(t) in embeddings
        }
        keyword_values["state_dict"] = gather_tensors(
            saved_tensors, model, keep_result=dist.get_rank() == 0, device="cpu"
        )
        writes = writes and dist.get_rank() == 0
    if writes:
        type(model).save_pretrained(*bound_arguments.args, **bound_arguments.kwargs)


# ---- unsupported adapters -------------------------------------------------------------------------------------------

_ONLY_LINEAR = "a parallel model supports LoRA on nn.Linear only."


def check_config(config: LoraConfig) -> None:
    """Check that `config` requests only LoRA on the linear layers of a parallel model.

    Raises:
        TypeError: `config` is not a LoraConfig.
        ValueError: a field is not supported; the message names it.
    """
    if type(config) is not LoraConfig:
        raise TypeError(f"A parallel model supports LoraConfig only, got {type(config).__name__}.")
    variants = [config_field.name for config_field in fields(config) if config_field.metadata.get("is_lora_variant")]
    unsupported_field = next((name for name in (*variants, *_UNSUPPORTED_FIELDS) if getattr(config, name, None)), None)
    if unsupported_field is not None:
        alternative = ", or apply the config before parallelize" if unsupported_field == "modules_to_save" else ""
        raise ValueError(
            f"The LoraConfig has {unsupported_field}={getattr(config, unsupported_field)!r}, which is not supported on "
            f"a model that is parallel already. Omit {unsupported_field}{alternative}."
        )
    init_method = config.init_lora_weights
    if not (isinstance(init_method, bool) or init_method == "gaussian"):
        raise ValueError(
            f"The LoraConfig has init_lora_weights={init_method!r}, which reads full weights and is not supported on a "
            "sharded model. Add the adapters before parallelize, or pass init_lora_weights=True."
        )


def _check_wrapper(name: str, wrapper: Any) -> None:
    class_name = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
    if isinstance(wrapper, BaseTunerLayer):
        variants = [type(variant).__name__ for variant in getattr(wrapper, "lora_variant", {}).values()]
        if type(wrapper) is not Linear or variants:
            description = f"{class_name} ({variants[0]})" if variants else class_name
            raise ValueError(
                f"PEFT has wrapped {name!r} in a {description}; {_ONLY_LINEAR} Remove {name!r} and similar modules "
                "from the config, or merge the adapters into the weights by merge_and_unload()."
            )
    elif type(wrapper) is not ModulesToSaveWrapper or next(wrapper.original_module.children(), None) is not None:
        raise ValueError(
            f"PEFT has wrapped {name!r} ({type(wrapper._modules[_base_key(wrapper)]).__name__}) in a {class_name}. A "
            "parallel model supports only modules_to_save without submodules, such as 'lm_head', and no trainable "
            f"tokens. Pass the names of the submodules of {name!r} instead."
        )


def _check_not_whole_block(name: str, whole_blocks: Collection[str]) -> None:
    # The hooks of a full-sequence block would have to be on the wrapper, but unloading an adapter removes the wrapper.
    if name in whole_blocks:
        raise ValueError(
            f"sequence_parallel=True does not support an adapter on {name!r}, which runs on the full sequence: the "
            f"adapter would get a shard. Remove {name!r} from the LoraConfig, or pass sequence_parallel=False."
        )


def _base_key(wrapper: nn.Module) -> str:
    return next(key for wrapper_type, key in _BASE_ATTRIBUTES.items() if isinstance(wrapper, wrapper_type))


def _added_modules(wrapper: Any) -> list[tuple[str, nn.Module]]:
    """Return (path in the wrapper, module) for each module that `wrapper` adds to the wrapped one."""
    attributes = ("lora_A", "lora_B") if isinstance(wrapper, Linear) else ("modules_to_save",)
    return [
        (f"{attribute}.{name}", module)
        for attribute in attributes
        for name, module in getattr(wrapper, attribute).items()
    ]


def _adapter_style(key: str, base: Style | None) -> Style | None:
    """Return the style of the module that a wrapper adds at `key` to a module with the style `base`."""
    spec = spec_of(base)
    if key.startswith("lora_A") and (spec.shard_dim == 0 or spec.shares_rotary):
        return None
    if key.startswith("lora_B") and spec.shard_dim == 1:
        return None
    return base
