"""Pipelines over torch.distributed.pipelining: split models into stages, with schedules that split backward."""

from fused_tp.pipelining.pipeline import Pipeline, pipeline
from fused_tp.pipelining.split import dw_builder
from fused_tp.pipelining.stages import estimated_costs, share_out
from fused_tp.pipelining.timeline import Span, bubble, draw

__all__ = ["Pipeline", "Span", "bubble", "draw", "dw_builder", "estimated_costs", "pipeline", "share_out"]
