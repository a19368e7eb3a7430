"""Declare two operators of torchvision, whose wheel is built for CUDA: SGLang imports its Python for image models."""

from __future__ import annotations

try:
    import torch
except ImportError:  # another Python that has inherited PYTHONPATH
    pass
else:
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
