"""What happens to a tile of a matmul before it is stored: scales, bias, activation, gate. All in fp32.

linear(x, w, scales, bias) = (x @ w^T) * x_scale * w_scale + bias
y = activation(linear(x, w))                       or, with a gate weight g,
y = activation(linear(x, g)) * linear(x, w)        (SwiGLU with silu, GEGLU with gelu: Shazeer, "GLU Variants
                                                    Improve Transformer", 2020)
"""

import triton
import triton.language as tl

from .tiles import tile_offsets

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
SCALES = ("none", "tensor", "row")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation of ACTIVATIONS; gelu is the exact one, gelu_tanh its approximation."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # not maximum: NaN stays NaN
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        return x


@triton.jit
def scale_tile(values, x_scale_ptr, w_scale_ptr, tile_m, tile_n, M, N, SCALES: tl.constexpr):
    """`values` times the scales of its operands: one each ("tensor"), or one per row of x [M] and of w [N] ("row")."""
    if SCALES == "tensor":
        return values * (tl.load(x_scale_ptr) * tl.load(w_scale_ptr))
    elif SCALES == "row":
        rows = tile_offsets(tile_m, values.shape[0])
        columns = tile_offsets(tile_n, values.shape[1])
        x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
        w_scale = tl.load(w_scale_ptr + columns, mask=columns < N, other=0.0)
        return values * x_scale[:, None] * w_scale[None, :]
    else:
        return values


@triton.jit
def add_bias(values, bias_ptr, tile_n, N):
    """`values` plus bias [N], where there is one."""
    if bias_ptr is None:
        return values
    else:
        columns = tile_offsets(tile_n, values.shape[1])
        return values + tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
