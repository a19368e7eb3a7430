"""Sphinx configuration of this documentation: `make docs`. tables.py generates tables about the code from the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tables  # noqa: E402  # needs the sys.path entries above

project = "fused_tp"
author = copyright = "the fused_tp developers"
release = re.findall(r'^version = "(.+)"', (HERE.parent / "pyproject.toml").read_text(), re.M)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fused_tp {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]

myst_enable_extensions = ["substitution"]
myst_heading_anchors = 3
myst_substitutions = tables.all_tables()

default_role = "code"
autodoc_typehints = "none"  # docstrings state shapes and dtypes, which types do not
autodoc_member_order = "bysource"
autodoc_mock_imports = ["megatron"]  # fused_tp subclasses its classes; the documentation is built without it
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|transformers|typing|pathlib)\..*|.*(Module|Exception|Error|ParallelStyle|object)")
]


def example_as_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn `Example:` into the start of a code block, unless prompts or `::` follow, which make it one already."""
    for index, line in enumerate(lines):
        next_line = lines[index + 1].strip() if index + 1 < len(lines) else ""
        if line.strip() == "Example:" and next_line and not next_line.startswith(">>>"):
            lines[index] = line.replace("Example:", "Example::")
            lines.insert(index + 1, "")
            return


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", example_as_code, priority=400)  # before napoleon
