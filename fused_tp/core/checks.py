"""Selection of the calls that are checked: the first ones, then every `FUSED_TP_CHECK_BATCH`-th."""

from __future__ import annotations

import torch

from fused_tp.core import settings

FIRST_CALLS = 3
_FIRST_CHANGES = 16


def is_check_due(call: int) -> bool:
    """True if ranks compare their data at call number `call`, counted from 1. False during CUDA graph capture."""
    interval = settings.batch_check_every()
    return interval > 0 and (call <= FIRST_CALLS or call % interval == 0) and not is_capturing()


def is_change_check_due(call: int) -> bool:
    """True if ranks look for changes of the model: at calls 1 to 16, 32, 64, ..., and if checks are due."""
    is_early = call <= _FIRST_CHANGES or is_power_of_two(call)
    return is_check_due(call) or (is_early and settings.batch_check_every() > 0 and not is_capturing())


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def is_repetition_due(call: int) -> bool:
    """True if a costly check is made at call `call` without a sign of a change: at the first 2, 10th, 100th, ..."""
    is_power_of_ten = call == 10 ** (len(str(call)) - 1)
    return settings.batch_check_every() > 0 and (call == 2 or is_power_of_ten) and not is_capturing()


def is_capturing() -> bool:
    """True during CUDA graph capture, in which the host cannot read tensor values."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
