"""How a matmul that talks to other ranks is launched, and the checks of what it is given before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..comm.workspace import Workspace
from ..resources import Variant
from .checks import DTYPES
from .configs import KINDS, FusedConfig, GemmConfig, fused_configs
from .operands import check_current, descriptor, fits_tma, is_swapped

# Matmuls that one launch adds up: the operands of each are arguments of the kernel.
MAX_PRODUCTS = 4
# fp8 is not among them: terms of a sum do not travel in 8 bits.
SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """Programs and tiles of a launch; equal on all ranks, because flags are counted in tiles and programs.

    How a rank loads its operands is its own affair: by TMA where they are aligned for it, else by pointers.
    """

    programs: int  # at most what the device runs at once
    config: GemmConfig  # by pointers
    precision: str = "ieee"  # of fp32: "ieee" or "tf32"
    strip_elements: int | None = None  # of a sum over ranks at a time; None: what registers hold
    tma_config: GemmConfig | None = None  # by TMA; None: never

    def __post_init__(self) -> None:
        tma = self.tma_config
        if tma and (tma.block_m, tma.block_n, tma.group_m) != (self.block_m, self.block_n, self.config.group_m):
            raise ValueError(f"config and tma_config must have the same tiles; they are {self.config} and {tma}.")

    @property
    def block_m(self) -> int:
        return self.config.block_m

    @property
    def block_n(self) -> int:
        return self.config.block_n

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        return -(-m // self.block_m), -(-n // self.block_n)

    def constants(self, config: GemmConfig | None = None) -> dict[str, Any]:
        """Constexprs that are the same for all K, of `config` or by pointers."""
        config = config or self.config
        return {
            "PRECISION": self.precision,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
        }

    def strip_rows(self, config: GemmConfig, element_bytes: int) -> int:
        """Rows of a tile that are summed over ranks at a time: 8 ranks' terms take half of the registers then."""
        elements = self.strip_elements or 1024 // element_bytes * config.num_warps
        return max(1, min(config.block_m, elements // config.block_n))

    def options(self, k: int) -> dict[str, Any]:
        """Keyword arguments of a launch by pointers."""
        return self.constants() | {"EVEN_K": k % self.config.block_k == 0} | self.config.options()


def launch_for(
    dtype: torch.dtype,
    m: int,
    n: int,
    world_size: int,
    *,
    arch: int,
    sms: int,
    sm_margin: int = 0,
    precision: str = "ieee",
    programs: int | None = None,
) -> Launch:
    """The launch of a matmul [m, n] over `world_size` ranks, chosen from what all ranks know alike.

    Args:
        dtype: bf16, fp16 or fp32, of the operands and of the result.
        m, n: of the whole result. K does not matter: it may differ between ranks.
        arch: 80, 90 or 100 (`operands.arch_of`); 0 under the interpreter.
        sms: multiprocessors of the GPU; the same on all ranks.
        sm_margin: how many of them to leave to what runs beside.
        precision: of fp32: "ieee" or "tf32".
        programs: how many to launch, in place of one or two for each SM.

    Raises:
        ValueError: a dtype, precision or number that is not as above.

    Example:
        launch = launch_for(torch.bfloat16, 4096, 8192, 8, arch=90, sms=132, sm_margin=8)
    """
    if dtype not in SUMMED_DTYPES:
        raise ValueError(f"dtype must be bf16, fp16 or fp32; got {dtype}.")
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision must be 'ieee' or 'tf32'; got {precision!r}.")
    if min(m, n) < 0 or world_size < 1:
        raise ValueError(f"m and n must be 0 or more and world_size 1 or more; got {m}, {n} and {world_size}.")
    if not 0 <= sm_margin < sms:
        raise ValueError(f"sm_margin must leave at least one of the {sms} SMs; got {sm_margin}.")
    if programs is not None and programs < 1:
        raise ValueError(f"programs must be at least 1; got {programs}.")
    kind = precision if dtype == torch.float32 else DTYPES[dtype]
    choices = fused_configs(arch, kind)
    if not choices:
        raise ValueError(f"arch must be 80, 90, 100 or, interpreted, 0; got {arch}.")

    def tiles(choice: FusedConfig) -> int:
        # Tiles do not span the rows of two ranks, where rows belong to ranks.
        rows_per_rank = -(-m // world_size)
        return world_size * -(-rows_per_rank // choice.block_m) * -(-n // choice.block_n)

    def at_once(choice: FusedConfig) -> int:
        return programs or max(1, min(choice.programs_per_sm * (sms - sm_margin), tiles(choice)))

    def time(choice: FusedConfig) -> float:
        rounds = -(-tiles(choice) // at_once(choice))
        return rounds * choice.block_m * choice.block_n * choice.programs_per_sm / choice.speed

    best = min(choices, key=time)
    return Launch(at_once(best), best.pointers, precision if kind == precision else "ieee", tma_config=best.tma)


@dataclass(frozen=True)
class LoadPlan:
    """How this rank loads the operands of a launch, and why."""

    config: GemmConfig
    tma: bool
    reason: str
    x_swapped: bool
    w_swapped: bool


def plan_loads(products: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> LoadPlan:
    """By TMA where all operands are aligned for it and lie alike, else by pointers."""
    xs, ws = [x for x, _ in products], [w for _, w in products]
    x_swapped, w_swapped = ({is_swapped(t) for t in tensors} for tensors in (xs, ws))
    if launch.tma_config is None:
        reason = "this launch has no tiles for TMA"
    elif not all(fits_tma(t) for t in xs + ws):
        reason = "an operand has rows that are not in one piece, or do not begin at multiples of 16 bytes"
    elif len(x_swapped) + len(w_swapped) > 2:
        reason = "the products' operands do not lie alike"
    elif True in x_swapped | w_swapped and xs[0].element_size() != 2:
        reason = "a transposed operand of this dtype is loaded by pointers: tensor cores transpose 16-bit numbers only"
    else:
        return LoadPlan(launch.tma_config, True, "operands are aligned", is_swapped(xs[0]), is_swapped(ws[0]))
    # By pointers it is about speed alone how the others lie.
    return LoadPlan(_by_pointers(launch, len(products)), False, reason, is_swapped(xs[0]), is_swapped(ws[0]))


def _by_pointers(launch: Launch, products: int) -> GemmConfig:
    """Several products are as many loops, all of whose pointers are ready at once: half as many each."""
    config = launch.config
    return replace(config, block_k=config.block_k // 2) if products > 1 and config.block_k > 32 else config


def operand_arguments(products: Sequence[tuple[Tensor, Tensor]], launch: Launch, *, flatten: bool) -> dict[str, Any]:
    """What a launch passes for its products: x0, w0, ... up to MAX_PRODUCTS, their sizes, constexprs and options.

    `flatten` False says that the kernel's loop over tiles is not one that may be flattened with that over K.
    """
    plan = plan_loads(products, launch)
    config = plan.config
    arguments: dict[str, Any] = dict.fromkeys(OPERANDS)
    for i, (x, w) in enumerate(products):
        if plan.tma:
            arguments[f"x{i}"] = descriptor(x, (config.block_m, config.block_k))
            arguments[f"w{i}"] = descriptor(w, (config.block_n, config.block_k))
        else:
            arguments[f"x{i}"], arguments[f"w{i}"] = x, w
    arguments["sizes"] = tuple((x.shape[1], *x.stride(), *w.stride()) for x, w in products)
    even = all(x.shape[1] % config.block_k == 0 for x, _ in products)
    element_bytes = products[0][0].element_size()
    return arguments | _constants(launch, plan, element_bytes, len(products), even, flatten) | _options(config)


def workspace_arguments(workspace: Workspace) -> dict[str, Any]:
    """What kernels pass to `signals.begin`, by name."""
    names = ("workspaces_ptr", "state_ptr", "error_ptr", "rank", "half_bytes", "timeout_ns")
    return dict(zip(names, workspace.arguments, strict=True))


OPERANDS = tuple(f"{name}{i}" for i in range(MAX_PRODUCTS) for name in "xw")


def _options(config: GemmConfig) -> dict[str, int]:
    """The compiler's options. Left alone ptxas takes fewer registers than there are, for more programs, and spills."""
    registers = 65536 // (config.programs_per_sm * config.num_warps * 32)
    return config.options() | {"maxnreg": min(255, registers)}


def _constants(
    launch: Launch, plan: LoadPlan, element_bytes: int, products: int, even: bool, flatten: bool
) -> dict[str, Any]:
    return launch.constants(plan.config) | {
        "STRIP_M": launch.strip_rows(plan.config, element_bytes),
        "PRODUCTS": products,
        "TMA": plan.tma,
        "X_SWAPPED": plan.x_swapped,
        "W_SWAPPED": plan.w_swapped,
        "EVEN_K": even,
        "SPLIT_STORE": plan.config.split_store,
        # Triton flattens two loops into one, not three.
        "FLATTEN": plan.config.flatten and flatten and products == 1,
    }


def launches(arch: int) -> Iterator[tuple[str, str, Launch]]:
    """(kind of matmul, element type, launch) of what is shipped for `arch`: what the tests compile."""
    for kind in KINDS:
        if kind != "fp8e4nv":
            element = "fp32" if kind in ("tf32", "ieee") else kind
            for config in fused_configs(arch, kind):
                precision = kind if element == "fp32" else "ieee"
                yield kind, element, Launch(config.programs_per_sm, config.pointers, precision, tma_config=config.tma)


def compile_arguments(function: Any, element: str) -> dict[str, str | int | None]:
    """What `resources.Variant` wants to know of a kernel's run-time arguments, for contiguous operands by pointers."""
    words = ("workspaces_ptr", "state_ptr", "error_ptr")
    wide = ("half_bytes", "timeout_ns", "terms_offset", "sums_offset", "multicast")
    known: dict[str, str | int | None] = {
        **dict.fromkeys(words, "*i64"),
        **dict.fromkeys(wide, "i64"),
        "eps": "fp32",
        "stride_xk": 1,
        "stride_wk": 1,
    }
    return {
        name: known.get(name, f"*{element}" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
        if not name.isupper() or name in ("M", "N", "K")
    }


def fused_variant(
    kernel: str,
    function: Any,
    arch: int,
    kind: str,
    element: str,
    launch: Launch,
    constants: dict[str, Any],
    *,
    tma: bool,
    name: str = "",
    layout: str = "nt",
    products: int = 1,
    flatten: bool = True,
) -> Variant:
    """One compilation of a kernel of sums over ranks; `layout` as in `gemm.compile_variants`."""
    config = launch.tma_config if tma else _by_pointers(launch, products)
    assert config is not None
    x_swapped, w_swapped = layout[0] == "t", layout[1] == "n"
    plan = LoadPlan(config, tma, "", x_swapped, w_swapped)
    # An odd K, since masks along K take registers; by TMA there are none.
    arguments: dict[str, Any] = compile_arguments(function, element) | dict.fromkeys(OPERANDS)
    for i in range(products):
        for operand, rows, is_transposed in (("x", config.block_m, x_swapped), ("w", config.block_n, w_swapped)):
            block = f"{config.block_k}, {rows}" if is_transposed else f"{rows}, {config.block_k}"
            arguments[f"{operand}{i}"] = f"tensordesc<{element}[{block}]>" if tma else f"*{element}"
    strides = (1, "i32") if x_swapped else ("i32", 1), (1, "i32") if w_swapped else ("i32", 1)
    arguments["sizes"] = (("i32", *strides[0], *strides[1]),) * products
    return Variant(
        kernel,
        " ".join(filter(None, [kind, layout, f"{products} products" if products > 1 else "", name]))
        + f" {'tma' if tma else 'pointers'} {config}",
        arch,
        function,
        arguments,
        _constants(launch, plan, 4 if element == "fp32" else 2, products, tma, flatten) | constants,
        _options(config),
        odd=frozenset({"rank", "rows_per_rank"}),
        matrix_instruction=kind != "ieee",
    )


def check_products(products: Sequence[tuple[Tensor, Tensor]], workspace: Workspace) -> tuple[int, int]:
    """(M, N) of a sum of matmuls. Raises ValueError where they are not what a kernel can multiply and add."""
    if not 1 <= len(products) <= MAX_PRODUCTS:
        raise ValueError(f"products must be 1 to {MAX_PRODUCTS} pairs (x, weight); got {len(products)}.")
    first = products[0][0]
    for i, (x, weight) in enumerate(products):
        x_name, weight_name = ("x", "weight") if len(products) == 1 else (f"products[{i}][0]", f"products[{i}][1]")
        check_matmul(x, weight, workspace, x_name, weight_name)
        shape = x.shape[0], weight.shape[0]
        if shape != (first.shape[0], products[0][1].shape[0]) or x.dtype != first.dtype:
            raise ValueError(
                f"products must have one M, N and dtype; products[0] is {tuple(first.shape)} by "
                f"{tuple(products[0][1].shape)} {first.dtype}, products[{i}] {tuple(x.shape)} by "
                f"{tuple(weight.shape)} {x.dtype}."
            )
    return first.shape[0], products[0][1].shape[0]


def check_matmul(
    x: Tensor, weight: Tensor, workspace: Workspace, x_name: str = "x", weight_name: str = "weight"
) -> None:
    """Raises ValueError where x [M, K] and weight [N, K] are not what a kernel can multiply."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{x_name} must be [M, K] and {weight_name} [N, K]; got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if x.dtype not in SUMMED_DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"{x_name} and {weight_name} must be both bf16, fp16 or fp32; got {x.dtype} and {weight.dtype}."
        )
    if not x.device == weight.device == workspace.state.device:
        raise ValueError(
            f"{x_name}, {weight_name} and the workspace must be on one device; they are on {x.device}, "
            f"{weight.device} and {workspace.state.device}."
        )
    check_current(x.device)


def check_like(name: str, tensor: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Raises ValueError where an optional tensor has not this shape, x's dtype and device, and rows in one piece."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}; got {tuple(tensor.shape)}.")
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(f"{name} must be {x.dtype} on {x.device} as x is; got {tensor.dtype} on {tensor.device}.")
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} must have its rows in one piece; its strides are {tensor.stride()}.")
