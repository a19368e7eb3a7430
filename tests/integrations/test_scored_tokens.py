"""Log-probabilities from TRL's output layer on a parallel model equal those of one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fused_tp
from tests.integrations.models import assert_near, assert_same_gradients, copy_of, make, make_tokens, mesh_of
from tests.workers import on_ranks

if find_spec("trl") is None:  # importing it takes seconds
    pytest.skip("TRL is not installed; pip install trl", allow_module_level=True)

pytestmark = pytest.mark.full


@on_ranks(4)
def test_log_probabilities(group: dist.ProcessGroup) -> None:
    from trl.trainer.utils import add_fused_lm_head

    tokens = make_tokens(2, 18)
    labels = tokens.clone()
    labels[:, :5] = -100
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    mesh = mesh_of(group, 2, 2)
    for given in ({"labels": labels}, {"labels": labels, "num_items_in_batch": 7}, {"shift_labels": shifted}):
        for keywords in ({}, {"sequence_parallel": True}, {"sequence_parallel": True, "loss_parallel": True}):
            whole = make("llama")
            parallel = fused_tp.parallelize(copy_of(whole), mesh, **keywords)
            outputs: list[Any] = []
            for model in (whole, parallel):
                add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
                outputs.append(model(input_ids=tokens, fused_lm_head=True, use_cache=False, **given))
                (-outputs[-1].log_probs.sum() / 7).backward()
            wanted, found = outputs
            for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
                assert found[name].shape == wanted[name].shape and found[name].dtype == wanted[name].dtype, name
                assert_near(found[name].float(), wanted[name].float(), name)
            assert_same_gradients(parallel, whole)
