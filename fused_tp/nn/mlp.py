"""Tensor parallel feed-forward block of a transformer: column-parallel layers followed by a row-parallel layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.nn.linear import (
    ColumnParallelLinear,
    LayerKeywords,
    RowParallelLinear,
    check_nothing_dropped,
    check_positive,
    compute_column_outputs,
    require_linear,
)
from fused_tp.nn.norm import replicate_own_parameters
from fused_tp.nn.sharding import Memo, check_mesh
from fused_tp.ops.arguments import check_bool

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

# (gate, up, down) as models name them; without a gate, (None, up, down).
_LAYER_NAMES: list[tuple[str | None, str, str]] = [
    ("gate_proj", "up_proj", "down_proj"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "c_fc", "c_proj"),
]
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation", "hidden_act")


class ParallelMLP(nn.Module):
    """down(act(up(x))), or gated down(act(gate(x)) * up(x)), with the intermediate features sharded over `mesh`.

    Shapes on a rank: x [..., hidden_size] -> the same shape. With `sequence_parallel`, x and the result are this rank's
    shard along `sequence_dim`. Gate and up share one gather. Any intermediate size works.

    Args:
        hidden_size, intermediate_size: sizes of the full layer.
        activation: "gelu", "gelu_tanh", "relu", "silu" or an elementwise function. If it is a module (nn.PReLU), its
            parameters must have one element. They become replicated DTensors, with a complete gradient on every rank.
        gated: SwiGLU-like (https://arxiv.org/abs/2002.05202), with a third weight `gate_proj`.
        bias, device, dtype: options of all linear layers, as in nn.Linear.
        mesh, sequence_parallel, sequence_dim: as in ColumnParallelLinear.

    Raises:
        TypeError, ValueError: as in ColumnParallelLinear; or the activation is unknown, or has larger parameters.

    Example:
        >>> mlp = ParallelMLP(512, 1408, activation="silu", gated=True, bias=False, mesh=mesh)
        >>> y = mlp(x)                      # [batch, seq, 512]
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        **keywords: Unpack[LayerKeywords],
    ) -> None:
        super().__init__()
        check_positive("hidden_size", hidden_size)
        check_positive("intermediate_size", intermediate_size)
        check_bool(gated=gated)
        self.activation = _resolve_activation(activation, keywords["mesh"])
        self._layer_names: tuple[str | None, str, str] = ("gate_proj" if gated else None, "up_proj", "down_proj")

        if gated:
            self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **keywords)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **keywords)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **keywords)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        mesh: DeviceMesh,
        activation: str | Activation | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        memo: Memo | None = None,
    ) -> ParallelMLP:
        """Build the MLP over `mesh` from a module with nn.Linear layers. Nothing is sent.

        The layers must be named gate_proj, up_proj and down_proj (Llama), up_proj and down_proj, fc1 and fc2 (OPT,
        ViT), or c_fc and c_proj (GPT). They keep their names. `activation` defaults to the module's attribute act_fn,
        activation_fn, act, activation or hidden_act.

        Raises:
            TypeError: a layer is not an nn.Linear.
            ValueError: the layers have other names, the module has more submodules (which would be dropped), or no
                activation is found.

        Example:
            >>> block.mlp = ParallelMLP.from_module(block.mlp, mesh=mesh["tp"])
        """
        names = _find_layer_names(module)
        check_nothing_dropped(module, cls.__name__, {*filter(None, names), *_ACTIVATION_NAMES})
        if activation is None:
            candidates = (getattr(module, name) for name in _ACTIVATION_NAMES if hasattr(module, name))
            activation = next(candidates, None)
            if isinstance(activation, nn.Module):  # the copy keeps the parameters, which `memo` knows
                activation = copy.deepcopy(
                    activation, {id(parameter): parameter for parameter in activation.parameters()}
                )
        if activation is None:
            raise ValueError(
                f"{type(module).__name__} has none of the attributes {', '.join(_ACTIVATION_NAMES)}. Pass the "
                "activation function as `activation`."
            )
        mlp = cls.__new__(cls)
        nn.Module.__init__(mlp)
        mlp.activation = _resolve_activation(activation, mesh, memo)
        mlp._layer_names = names
        options: dict[str, Any] = {"mesh": mesh, "memo": memo}
        options |= {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        for column_name in names[:2]:
            if column_name is not None:
                mlp.add_module(
                    column_name, ColumnParallelLinear.from_linear(require_linear(module, column_name), **options)
                )
        mlp.add_module(names[2], RowParallelLinear.from_linear(require_linear(module, names[2]), **options))
        return mlp.train(module.training)

    def forward(self, x: Tensor, *, seq_len: int | None = None) -> Tensor:
        """Return the output for x.

        Args:
            seq_len: length of the full sequence; needed with `sequence_parallel` if shards differ in length.
        """
        gate_name, up_name, down_name = self._layer_names
        down = cast(nn.Module, getattr(self, down_name))
        if gate_name is None:
            (up,) = compute_column_outputs([getattr(self, up_name)], x, seq_len)
            return down(self.activation(up))
        gate, up = compute_column_outputs([getattr(self, gate_name), getattr(self, up_name)], x, seq_len)
        return down(self.activation(gate) * up)


def _find_layer_names(module: nn.Module) -> tuple[str | None, str, str]:
    for names in _LAYER_NAMES:
        if all(hasattr(module, name) for name in names if name is not None):
            return names
    supported_names = "; ".join("/".join(name for name in names if name) for names in _LAYER_NAMES)
    raise ValueError(
        f"{type(module).__name__} has no set of layers that ParallelMLP supports ({supported_names}). Convert its "
        "linear layers one by one with ColumnParallelLinear.from_linear and RowParallelLinear.from_linear."
    )


def _resolve_activation(activation: str | Activation, mesh: DeviceMesh, memo: Memo | None = None) -> Activation:
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} or a function, got {activation!r}.")
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {type(activation).__name__}.")
    for module in activation.modules() if isinstance(activation, nn.Module) else ():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() > 1:
                raise ValueError(
                    "parameters of an activation must have one element, because the intermediate features are sharded; "
                    f"{name} of {type(activation).__name__} has shape {tuple(parameter.shape)}. Convert the linear "
                    "layers one by one, with gather_output=True before the activation and input_is_parallel=False "
                    "after it."
                )
        replicate_own_parameters(module, check_mesh(mesh), memo, sums_gradients=lambda: True)  # one term per rank
    return activation
