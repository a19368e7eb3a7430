"""Flash attention: forward and backward that accumulate in fp32, decoding, and ring attention in one launch."""

from .backward import flash_backward
from .forward import flash_attention, flash_forward
from .launch import DropoutArguments, ScoreTerms, obstacle

__all__ = ["DropoutArguments", "ScoreTerms", "flash_attention", "flash_backward", "flash_forward", "obstacle"]
