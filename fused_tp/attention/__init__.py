"""Attention over a sequence sharded over ranks: token layouts, masks, schedules, transfers and kernels."""
