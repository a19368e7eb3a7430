"""Rules of CONTRIBUTING.md for docstrings and pages that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("fused_tp", "triton_kernels", "benchmarks", "csrc", "docs", "examples", "tests")
# A docstring begins with a verb or with a noun phrase: these begin clauses and fragments.
CLAUSE = re.compile(
    r"(What|Whether|Whose?|Which|Where|When|How|Why|Of|As|In|On|By|For|From|To|With|After|Before|Again|Until|Since|If|"
    r"That|Those|Such|So|It|They|There|Here|And|But|Else|Not|Nothing|Also|Only)\s"
)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Names in pages that occur in no code of this package: other libraries' names, and the example of a naming rule.
FOREIGN = IDENTIFIER.findall("""
    DistributedAttention EnforceNotMet LongContextAttention PipelineModule SequentialMLP TorchTrainer _distributed_c10d
    _low_contention_ _varlen_func buffer_seq_dims connectFullMesh get_thd_batch_on_this_cp_rank model_provider
    seed_everything split_dataset_by_node stripe_flash_attn_func synced_gpus use_per_sequence_balancing w_shard_n
""")
SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh", ".toml", ".json", ".yaml", ".txt"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCES and "results" not in path.parts:
                yield path


def docstrings() -> Iterator[tuple[str, str]]:
    """(Place, docstring) of all modules, classes and functions."""
    for path in sources(*FOLDERS):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    clauses = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if CLAUSE.match(text)]
    assert not clauses, "\n".join(clauses)


def test_names_in_pages_exist() -> None:
    known = {name for path in sources(*FOLDERS) for name in IDENTIFIER.findall(path.read_text())} | {*FOREIGN}
    for path in (ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "setup.py", ROOT / "noxfile.py"):
        known.update(IDENTIFIER.findall(path.read_text()))
    known |= {path.stem for path in sources(*FOLDERS)}
    missing = []
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([^`\n]+)`", text):
            for name in IDENTIFIER.findall(code):
                # Words of prose in code marks are not looked up.
                if ("_" in name.strip("_") or re.search("[a-z][A-Z]", name)) and name not in known:
                    missing.append(f"{page.relative_to(ROOT)}: {name} in {code}")
    assert not missing, "\n".join(missing)


def test_a_class_name_means_one_thing() -> None:
    """Exempt are the arguments of each op, and the nested configs that torchtitan asks for."""
    places: dict[str, list[str]] = {}
    for path in sources("fused_tp", "triton_kernels", "benchmarks"):
        if path.suffix == ".py":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name not in ("_Args", "_BackwardArgs"):
                    places.setdefault(node.name.strip("_"), []).append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not [several for several in places.values() if len(several) > 1]
