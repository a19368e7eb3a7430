"""What becomes of the product of a query and a key before softmax, and of its probability after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """Probabilities are zeroed with probability p and the others divided by 1 - p.

    Which ones, is said by `seed` and the place of the element in the whole: batch row, head (`first_head` + the local
    one), index of query and of key. So it does not depend on how many ranks there are, nor on who computes it.
    """

    p: float
    seed: int  # 63 bits
    first_head: int = 0


@dataclass(frozen=True)
class Scores:
    """score = cap(scale * q.k) - slope[head] * |place of q - index of k|, with cap(x) = softcap * tanh(x / softcap).

    softcap 0.0: no cap. alibi_slopes [heads], fp32 (fp64 for fp64); None: no such term. (Press et al., ALiBi,
    arXiv:2108.12409; Gemma 2, arXiv:2408.00118.)
    """

    scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def plain(self) -> bool:
        """Whether a score is scale * q.k and nothing is dropped."""
        return self.softcap == 0.0 and self.alibi_slopes is None and self.dropout is None
