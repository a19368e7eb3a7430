"""What becomes of the product of a query and a key before softmax, and of its probability after.

    score = cap(scale * q.k) - slope * |place of q - index of k|        cap(x) = softcap * tanh(x / softcap)
    p     = exp(score - lse) = 2^(score * log2(e) - ...)

The kernels work in base 2: plain scores stay products until the exponent, where one multiply-add scales and subtracts;
the others are scaled here. `scores` is what is multiplied by `factor` (1 for the latter) to be of base 2.

Dropout is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): key (seed low, seed
high); counter (index of k // 4, index of q, head, batch row); of the four words the one of number index of k % 4. The
element is dropped where that is below a threshold.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """By its series near 0, where the quotient would lose what `exp` rounds."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    near = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - 0.0539682540 * square)))
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, far))


@triton.jit
def scores_of(products, distance, slope, scale, softcap, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """(scores, derivative of the cap) of products q.k; `distance` is |place of q - index of k|, of ALIBI only."""
    slant = products
    if CAPPED:
        bent = tanh(products * (scale / softcap))
        slant = 1.0 - bent * bent
        products = bent * (softcap * LOG2_E)
    elif ALIBI:
        products = products * (scale * LOG2_E)
    if ALIBI:
        products -= distance * (slope * LOG2_E)
    return products, slant


@triton.jit
def factor_of(scale, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """What scores are multiplied by to be those of base 2."""
    if CAPPED or ALIBI:
        return 1.0
    else:
        return scale * LOG2_E


@triton.jit
def kept(q_indices, k_indices, head, batch, seed_low, seed_high, dropped_below):
    """What dropout keeps. The indices are int32 that broadcast against each other; of the others the bits count."""
    c0 = (k_indices // 4).to(tl.uint32)
    c1 = q_indices.to(tl.uint32)
    c2, c3 = head.to(tl.uint32), batch.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, c2, c3, seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    )
    word = k_indices % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits >= dropped_below.to(tl.uint32, bitcast=True)


@triton.jit
def probabilities(
    products,
    lse,
    seen,
    distance,
    slope,
    scale,
    softcap,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """(p = exp(score - lse), derivative of the cap) of a block of products; lse, in base 2, broadcasts against it.

    What is not `seen` gives 0, whatever it holds: selected, not multiplied, or its infinities would show.
    """
    s, slant = scores_of(products, distance, slope, scale, softcap, CAPPED, ALIBI)
    p = tl.exp2(s * factor_of(scale, CAPPED, ALIBI) - lse)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p, slant


@triton.jit
def dropped(values, keep, keep_scale, DROPOUT: tl.constexpr):
    """What dropout makes of probabilities, and of the gradients of what it makes of them."""
    if DROPOUT:
        return tl.where(keep, values * keep_scale, 0.0)
    else:
        return values


@triton.jit
def gradient_of_scores(p, gradient, sums, seen, MASKED: tl.constexpr):
    """p * (gradient - sums), 0 where not `seen`; `gradient` is that of p, of dropout too."""
    ds = p * (gradient - sums)
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return ds
