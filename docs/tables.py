"""Generate the tables of the documentation from the code: settings, schedules, support, styles and models.

Pages refer to them as substitutions: a line `{{ settings }}` becomes the table that `settings()` returns.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from fused_tp.backends.registry import SCHEDULES
from fused_tp.core import dispatch
from fused_tp.core.settings import SETTINGS
from fused_tp.parallelizing import shard_plan as plan
from fused_tp.planning import published
from fused_tp.planning.hardware import MACHINES
from fused_tp.planning.model_count import count_sharded_share
from tests.integrations.model_families import FAMILIES, OWN_SIZES

# Public names of ops, and their names in the registry.
OPS = {
    "all_gather_matmul": "all_gather_matmul",
    "matmul_reduce_scatter": "matmul_reduce_scatter",
    "matmul_all_reduce": "matmul_all_reduce",
    "column_parallel_matmul": "matmul_all_reduce",
    "all_gather_grouped_matmul": "all_gather_grouped_matmul",
    "grouped_matmul_reduce_scatter": "grouped_matmul_reduce_scatter",
    "grouped_matmul_all_reduce": "grouped_matmul_all_reduce",
    "column_parallel_grouped_matmul": "grouped_matmul_all_reduce",
    "all_reduce_rms_norm": "all_reduce_rms_norm",
    "matmul_all_reduce_rms_norm": "matmul_all_reduce_rms_norm",
    "ring_attention": "ring_attention",
    "ulysses_attention": "all_to_all",
}
RANKS, HIDDEN = 2, 4096
# Communication and purpose of each schedule.
ABOUT = {
    "plain": ("the matmul, then one collective of torch.distributed", "any group; small shapes"),
    "pipelined": ("chunks travel over torch.distributed while others are multiplied", "any group"),
    "one_sided": ("ranks read and add each other's memory in place", "CPU ranks of one host"),
    "symm_mem": (
        "torch's own ops over symmetric memory: copies beside matmuls, and kernels that add (`torch.ops.symm_mem`)",
        "GPUs joined by NVLink",
    ),
    "fused_kernel": (
        "one Triton kernel multiplies, sends, waits and adds, tile by tile; one launch attends to all ranks' keys",
        "GPUs joined by NVLink",
    ),
    "one_shot": (
        "the library's matmul, then one CUDA kernel that exchanges and adds in one hop",
        "GPUs joined by NVLink",
    ),
    "two_shot": ("the same in two hops, which send fewer bytes", "GPUs joined by NVLink"),
    "multimem": ("the same, added by the NVLink switch", "GPUs joined by NVSwitch with SHARP"),
    "copy_engine": (
        "copy engines gather and scatter beside the library's matmuls, which keep all multiprocessors",
        "GPUs joined by NVLink",
    ),
    "nccl_pipeline": (
        "chunks travel over an NCCL communicator of the group's own, without a wait on the host",
        "any NVIDIA GPUs: several hosts, PCIe",
    ),
    "hierarchical": (
        "`one_sided`, `fused_kernel` or `two_shot` inside each host, messages between hosts: each rank sends 1/L of "
        "what a flat exchange sends, for L ranks on a host",
        "groups of several hosts",
    ),
}
# Effect of each style of a `tp_plan` on its module.
STYLES = {
    "colwise": "sharded along the outputs",
    "colwise_gather_output": "sharded along the outputs, which are gathered",
    "colwise_rep": "the same, by its older name",
    "rowwise": "sharded along the inputs; the outputs are summed",
    "rowwise_split_input": "the same, of an input that every rank has in full",
    "rowwise_rep": "the same, by its older name",
    "embedding_rowwise": "an embedding sharded along the vocabulary",
    "head_bias": "an embedding with one column per head, of whose output a rank gets its heads",
    "grouped_colwise": "a linear layer for each group of heads (DeepSeek V4), of which a rank has its own groups' rows",
    "local_params": "whole on every rank, but for its own parameters that the plan names (`colwise`: attention sinks; "
    "`depthwise`, `packed_depthwise_3`: the channels of a convolution)",
    "mla_kv_a_proj": "whole on every rank; the part of its output that all heads share gets the sum of their gradients",
    "moe_identity_expert": "an expert that returns what it is given; one rank adds it",
    "ep_dispatch_experts": "experts, whole ones distributed over the ranks of `ep_dim`",
    "moe_tp_experts": "experts, of each of which a rank has a part: those of its own parameters that the plan names",
    "multi_query_colwise": "sharded along the outputs that are queries; all ranks have the others, one head's keys and "
    "values",
    "packed_colwise": "sharded along the outputs, in each of two consecutive parts (gate and up)",
    "packed_colwise_3": "the same, of three parts: q, k and v",
    "packed_colwise_12": "the same, of four blocks of q, k and v",
    "packed_rowwise_4": "sharded along the inputs, of which four parts lie one after the other, each of them",
    "replicate": "whole on every rank",
    "sequence_parallel": "whole on every rank, on this rank's tokens",
    "shared_output": "whole on every rank; its output, which all heads share, gets the sum of their gradients",
    "replicated_with_grad_allreduce": "whole on every rank, on this rank's heads or features",
}
FEATURES = {
    "sliding_window": "sliding windows",
    "attn_logit_softcapping": "soft caps",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "linear_conv_kernel_dim": "linear attention",
    "linear_head_dim": "linear attention",
    "mamba_d_state": "state spaces",
    "state_size": "state spaces",
    "conv_L_cache": "short convolutions",
}


# Reasons why `parallelize` rejects a model type, by a part of its error message.
REASONS = {
    "has no tp_plan": "no plan",
    "cannot be replaced": "attention cannot be replaced",
    "mix tokens by other means than attention": "tokens meet outside of attention",
    "uses a custom attention mask": "a custom mask",
    "neither a causal language model nor": "more than a causal language model",
    "is not in the plan, but": "a module between sharded layers without a style",
    "directly, but the plan shards": "reads a weight that the plan shards",
    "has parameters but is not in the plan": "a module that may need the full sequence",
    "it needs the full sequence": "a module that may need the full sequence",
    "Unsupported styles in the plan": "a style that is not supported",
    "uses attn_implementation=": "attention cannot be replaced",
    "needs a plain nn.": "a custom class of layer",
    "tensor parallel ranks cannot share": "a size that two ranks cannot share",
    "does not compute its loss by self.loss_function": "a custom loss",
}

# What stays whole in types of which tensor parallelism shards less than 90 % of a block's elements, and why.
_MIXER_REASON = "out_proj of the mixers, and the scan between them: a fused kernel reads the weights directly"
WHOLE_PARTS = {
    "bamba": _MIXER_REASON,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "zamba2"), _MIXER_REASON),
}
# What stays whole in the types whose published sizes are in published_configs.json.
_LATENT_REASON = "projections to the latents, which all heads read; routers"
_INDEXER_REASON = "indexers: a sum over ranks of their scores, one per pair of tokens, costs as much as computing them"
PUBLISHED_WHOLE_PARTS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _LATENT_REASON),
    "deepseek_v32": f"{_LATENT_REASON}; {_INDEXER_REASON}",
    "deepseek_v4": f"{_LATENT_REASON}; the head of keys and its compressors; {_INDEXER_REASON}",
    "glm4_moe": "routers",
    "kimi_linear": f"{_LATENT_REASON}; projections to the ranks of the gates",
}

# Columns of the table, and their names in the sweep.
MODES = {"tp": "tp", "tp with sequence_parallel": "tp+sp", "cp": "cp"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings() -> str:
    rows = (
        (f"`{setting.name}`", setting.default, setting.meaning) for setting in SETTINGS if not setting.is_install_time
    )
    return table(("variable", "default", "meaning"), rows)


def install_settings() -> str:
    rows = ((f"`{setting.name}`", setting.default, setting.meaning) for setting in SETTINGS if setting.is_install_time)
    return table(("variable", "default", "meaning"), rows)


def schedules() -> str:
    assert ABOUT.keys() == SCHEDULES.keys(), "every schedule is described in docs/tables.py"
    rows = (
        (
            f"`{name}`",
            ABOUT[name][0],
            ABOUT[name][1],
            ", ".join(spec.device_types) or "any",
            str(spec.max_ranks or "any"),
        )
        for name, spec in SCHEDULES.items()
    )
    return table(("schedule", "how it moves bytes", "for", "devices", "ranks"), rows)


def support() -> str:
    """Schedules that implement each op in bfloat16, or those that do not."""
    rows = []
    for op, key in OPS.items():
        missing = [f"`{name}`" for name, spec in SCHEDULES.items() if not spec.supports(key, torch.bfloat16)]
        rows.append((f"`{op}`", ("all but " + ", ".join(missing)) if missing else "all"))
    return table(("op", "schedules"), rows)


def defaults() -> str:
    """Schedules that the shipped dispatch table chooses, for few tokens and for many."""
    transports = (
        *(("CPU, shared memory", "shm", "cpu"), ("CPU, gloo", "gloo", "cpu")),
        *(("CUDA, NCCL", "nccl", "sm_90"), ("CUDA, NVLink, until measured", "nvlink", "sm_90")),
    )

    def schedule_name(op: str, rows: int, transport: str, arch: str) -> str:
        key = dispatch.ScheduleKey(op, torch.bfloat16, torch.device("cpu"), rows, HIDDEN, HIDDEN)
        return f"`{dispatch.choose_schedule(key, RANKS, transport, arch).schedule}`"

    rows = []
    for op, key in OPS.items():
        if op.endswith("attention"):
            continue
        cells = []
        for _, transport, arch in transports:
            few, many = (schedule_name(key, num_rows, transport, arch) for num_rows in (1, 4096))
            cells.append(few if few == many else f"{few}, from some size on {many}")
        rows.append((f"`{op}`", *cells))
    return table(("op", *(label for label, _, _ in transports)), rows)


def styles() -> str:
    assert sorted(STYLES) == sorted(plan.STYLES), "every style is described in docs/tables.py"
    return table(("style", "the module is"), ((f"`{style}`", about) for style, about in STYLES.items()))


def models() -> str:
    rows = []
    for family, name in FAMILIES.items():
        special = [text for key, text in FEATURES.items() if key in OWN_SIZES.get(family, {})]
        special += ["attention sinks"] * (family == "gpt_oss")
        rows.append((f"`{name}ForCausalLM`", ", ".join(special)))
    return table(("transformers", "tested with"), rows)


def model_types() -> str:
    """Results of `model_types_of` for transformers' causal language models, grouped by result."""
    sweep = json.loads((Path(__file__).parent / "model_types.json").read_text())
    shares = json.loads((Path(__file__).parent / "sharded_shares.json").read_text())
    groups: dict[tuple[str, ...], list[str]] = {}
    for kind, results in sweep["types"].items():
        groups.setdefault((*results, _share_range(shares.get(kind))), []).append(kind)
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    counts = (
        f"{sum(results[i].startswith('yes') for results in sweep['types'].values())} with {mode}"
        for i, mode in enumerate(MODES)
    )
    versions = ", ".join(f"{name} {version}" for name, version in sweep["versions"].items())
    return f"Of {len(sweep['types'])} types ({versions}): {', '.join(counts)}.\n\n" + table(
        ("types", *MODES, "share of a block's elements that tp shards"),
        ((", ".join(f"`{kind}`" for kind in kinds), *results) for results, kinds in rows),
    )


def _share_range(shares: Sequence[float] | None) -> str:
    if shares is None:
        return ""
    return next((f"{bound} % or more" for bound in (99, 95, 90) if shares[0] >= bound / 100), "less than 90 %")


def sharded_shares() -> str:
    """Shares of a block's elements that tp shards: types with published sizes, and types below 90 %."""
    shares = json.loads((Path(__file__).parent / "sharded_shares.json").read_text())
    kinds = [*PUBLISHED_WHOLE_PARTS, *(kind for kind, (total, _) in shares.items() if total < 0.9)]
    whole_parts = PUBLISHED_WHOLE_PARTS | WHOLE_PARTS
    rows = ((f"`{kind}`", *(f"{share:.1%}" for share in shares[kind]), whole_parts[kind]) for kind in kinds)
    return table(("type", "of all elements", "outside of routed experts", "whole on every rank"), rows)


def documented_types() -> list[str]:
    """Model types in model_types.json."""
    return [*json.loads((Path(__file__).parent / "model_types.json").read_text())["types"]]


def published_config(kind: str) -> Any:
    """Config of a model type at published sizes; transformers' default, if published_configs.json has no others."""
    from transformers import CONFIG_MAPPING

    published_configs = json.loads((Path(__file__).parent / "published_configs.json").read_text())
    return CONFIG_MAPPING[kind](**published_configs.get(kind, {"config": {}})["config"])


def sharded_shares_file(kinds: Iterable[str]) -> str:
    """Content of docs/sharded_shares.json, with a line for each type that plan="auto" accepts at published sizes."""
    lines = []
    for kind in kinds:
        try:
            share = count_sharded_share(published_config(kind), num_ranks=2)
        except Exception as error:  # no plan, a library that is missing, a default config without a model
            print(f"{kind}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        else:
            lines.append(f" {json.dumps(kind)}: [{share.total:.4f}, {share.outside_experts:.4f}]")
    return "{\n" + ",\n".join(lines) + "\n}"


def model_types_of(outcomes: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Map each model type to "yes" or a reason for each of MODES, from the outcomes of tests.integrations.sweep."""
    return {kind: [_result(modes, mode) for mode in MODES.values()] for kind, modes in sorted(outcomes.items())}


def _result(modes: Mapping[str, Sequence[str]], mode: str) -> str:
    outcome, message = modes[mode]
    if outcome == "right":
        return "yes"
    if mode == "tp" and modes["advised"][0] == "right":
        return "yes, without what the refusal names"
    if outcome == "alone":
        return "not tested: too large" if message.endswith(" parameters") else "not tested: does not run by itself"
    return next((reason for part, reason in REASONS.items() if part in message), re.split(r"[.;:] ", message)[1][:80])


def model_types_file(outcomes: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Content of docs/model_types.json, with a line for each type."""
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    results_by_type = model_types_of(outcomes)
    types = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(results)}" for kind, results in results_by_type.items())
    return f'{{\n "versions": {json.dumps(versions)},\n "types": {{\n{types}\n }}\n}}'


def predictions() -> str:
    """Predictions of the cost model for published measurements, in a table for each set."""
    tables = []
    for title, (unit, make) in published.SETS.items():
        rows = make()
        cells = [(row.name, f"{row.published:.1f}", f"{row.predicted:.1f}", f"{row.error:+.1f}") for row in rows]
        cells.append(("mean of absolute errors", "", "", f"{published.mean_error(rows):.1f}"))
        tables.append(table((title, f"published, {unit}", "predicted", "error"), cells))
    return "\n\n".join(tables)


def planner() -> str:
    """Results of `python -m benchmarks.planner` on CPU ranks."""
    report = json.loads((Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "planner.json").read_text())
    machine, rows = report["machine"], report["rows"]
    cells, errors = [], []
    for row in rows:
        errors.append(row["predicted"] / row["measured"] - 1)
        seconds = (f"{row[name]:.3f}" for name in ("measured", "predicted"))
        cells.append((row["model"], row["way"], *seconds, f"{errors[-1]:+.1%}"))
    mean = sum(map(abs, errors)) / len(errors)
    cells.append(("mean of absolute errors", "", "", "", f"{mean:.1%}"))
    head = ("hidden size x layers", "spread over ranks", "measured, s", "predicted, s", "error")
    machine_text = f"{machine['name']}, {machine['ranks_per_node']} cores, torch {report['versions']['torch']}"
    setup = "8 rows of 256 tokens, fp32, one thread a rank; the median step of `fused-tp train`"
    best = "; ".join(f"{name}: {fastest}, recommended {plan}" for name, (fastest, plan) in report["fastest"].items())
    return f"{machine_text}, {report['date'][:10]}: {setup}.\n\n{table(head, cells)}\n\nFastest on two ranks: {best}."


def machines() -> str:
    """Machines of the cost model, with their numbers."""
    rows = (
        (
            f"`{machine.name}`",
            ", ".join(f"{value / 1e12:.0f} {name}" for name, value in machine.peak_flops.items()),
            ", ".join(f"{value / 1e12:.0f} {name}" for name, value in machine.matmul_flops.items()),
            f"{machine.attention_flops / 1e12:.0f}",
            f"{machine.memory / 1e9:.0f} GB, {machine.memory_bandwidth / 1e12:.2f} TB/s",
            f"{machine.link_bandwidth / 1e9:.0f}, {machine.network_bandwidth / 1e9:.0f}",
            machine.source,
        )
        for machine in MACHINES.values()
    )
    head = ("machine", "peak TFLOP/s", "matmuls", "attention", "memory", "GB/s within, between nodes", "source")
    return table(head, rows)


def tests() -> str:
    """Every test file with the first line of its docstring, and its seconds from `seconds_by_file`."""
    root = Path(__file__).resolve().parents[1]
    seconds = json.loads((root / "docs" / "test_seconds.json").read_text())
    rows = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text()
        first_line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        is_full_file = re.search(r"\npytestmark = \[?\s*pytest\.mark\.full", text)
        name = str(file.relative_to(root / "tests"))
        runs_in = "make test-all" if is_full_file else "make test"
        rows.append((f"`{name}`", first_line, runs_in, str(seconds.get(name, ""))))
    return table(("file", "tests", "runs in", "seconds"), rows)


def seconds_by_file(junit: str) -> dict[str, int]:
    """Sum the seconds per test file in a report of `pytest -m "" --junitxml=FILE`; files under 0.5 s are omitted."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        module = re.sub(r"\.[A-Z]\w*$", "", case.attrib["classname"])  # removes the name of a test class
        seconds[module.removeprefix("tests.").replace(".", "/") + ".py"] += float(case.attrib["time"])
    return {name: round(spent) for name, spent in sorted(seconds.items()) if spent >= 0.5}


def gpu_measured() -> str:
    """Steps of the selftest on GPUs."""
    sys.path.insert(0, str(Path(__file__).parent))
    import gpu_results

    return gpu_results.table(gpu_results.results())


def all_tables() -> dict[str, str]:
    table_functions: tuple[Callable[[], str], ...] = (
        settings, install_settings, schedules, support, defaults, styles, models, model_types, sharded_shares,
        predictions, planner, machines, tests, gpu_measured,
    )  # fmt: skip
    return {make_table.__name__: make_table() for make_table in table_functions}


if __name__ == "__main__":
    # python -m docs.tables REPORT > docs/test_seconds.json; python -m docs.tables outcomes.json > docs/model_types.json
    # python -m docs.tables shares > docs/sharded_shares.json
    if sys.argv[1] == "shares":
        print(sharded_shares_file(documented_types()))
    elif sys.argv[1].endswith(".json"):
        print(model_types_file(json.loads(Path(sys.argv[1]).read_text())))
    else:
        print(json.dumps(seconds_by_file(sys.argv[1]), indent=1))
