"""Every tensor creation in fused_tp names dtype and device: a program's defaults must not affect it."""

from __future__ import annotations

import ast

from torch.utils._device import _device_constructors

from tests.workers import REPOSITORY

MAKERS = {function.__name__ for function in _device_constructors()}
OF_INTEGERS = {"arange", "as_tensor", "asarray", "randint", "randperm"}  # default dtype does not apply
LAYERS = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d"}


def unnamed(call: ast.Call) -> set[str]:
    """The subset of {"dtype", "device"} that a tensor-creating call of torch or torch.nn does not name."""
    made, given = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    module, _, name = made.rpartition(".")
    if None in given or not ((module == "torch" and name in MAKERS) or (module == "nn" and name in LAYERS)):
        return set()
    return ({"device"} if name in OF_INTEGERS else {"device", "dtype"}) - given


def test_tensors_name_their_dtype_and_device() -> None:
    assert unnamed(ast.parse("torch.randn(3)", mode="eval").body) == {"device", "dtype"}  # type: ignore[arg-type]
    found = []
    for folder in ("fused_tp", "triton_kernels"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
            found += [
                f"{file.relative_to(REPOSITORY)}:{call.lineno} leaves {' and '.join(sorted(open_))} open"
                for call in calls
                if (open_ := unnamed(call))
            ]
    assert not found, "\n".join(found)
