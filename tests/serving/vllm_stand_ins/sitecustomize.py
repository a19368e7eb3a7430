"""Give CPU ranks the plugin's layers for GPUs, whose ops run on CPUs as well, and "measure" that 1 to 128 rows gain."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

if os.environ.get("FUSED_TP_TEST_GPU_LAYERS"):
    from torch.nn.functional import linear

    from fused_tp.backends import autotune
    from fused_tp.integrations import vllm

    _calls = count()

    def _keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    def _reason_off() -> str:
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _keep_weight  # as on GPUs
        return ""

    vllm._is_cpu = lambda: False
    vllm._reason_off = _reason_off
    autotune.choose_fastest = lambda seconds, incumbent: "matmul_all_reduce" if next(_calls) % 7 < 4 else incumbent
