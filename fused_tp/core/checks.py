"""The calls at which ranks compare their data: the first ones, then one of every `FUSED_TP_CHECK_BATCH`."""

from __future__ import annotations

import torch

from fused_tp.core import settings

FIRST_CALLS = 3


def is_due(call: int) -> bool:
    """True if ranks compare their data at call number `call` (from 1). False while a CUDA graph is captured."""
    every = settings.batch_check_every()
    return every > 0 and (call <= FIRST_CALLS or call % every == 0) and not is_capturing()


def is_capturing() -> bool:
    """True while a CUDA graph is captured, when no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
