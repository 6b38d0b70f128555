# SPDX-License-Identifier: Apache-2.0
"""Names and parameters of what vLLM asks an attention backend, read from the sources of any version.

pip download --no-deps vllm==0.34.0 && unzip vllm-0.34.0-*.whl -d unpacked
python tests/models/interface.py unpacked/vllm > tests/models/interfaces/0.34.json
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "kernels/pagedkv/vllm_plugin"
CLASSES = {
    "v1/attention/backend.py": (
        *("AttentionBackend", "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl", "MLAAttentionImpl"),
        "CommonAttentionMetadata",
    ),
    "model_executor/layers/attention/mla_attention.py": (
        *("MLACommonBackend", "MLACommonMetadataBuilder", "MLACommonImpl"),
    ),
    "v1/attention/backends/mla/cpu_mla.py": ("CPUMLABackend", "CPUMLAImpl"),
}


def describe(package: Path) -> dict[str, Any]:
    """What the vLLM in this folder has: methods and attributes of its classes, and which of what we import.

    A method is the parameters of its `def`, without annotations and with defaults as `...`; an attribute is null.
    """
    classes: dict[str, dict[str, str | None]] = {}
    for file, names in CLASSES.items():
        body = ast.parse((package / file).read_text()).body
        classes |= {node.name: _members(node) for node in body if isinstance(node, ast.ClassDef) and node.name in names}
    return {"classes": classes, "symbols": sorted(symbol for symbol in imported() if _has(package, *symbol.split(":")))}


def imported() -> set[str]:
    """`module:name` of everything that the plugin imports from vLLM."""
    nodes = (node for file in PLUGIN.glob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")]
    return {f"{node.module}:{alias.name}" for node in froms for alias in node.names}


def _members(node: ast.ClassDef) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            for argument in ast.walk(item.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            item.args.defaults = [ast.Constant(...) for _ in item.args.defaults]
            item.args.kw_defaults = [default and ast.Constant(...) for default in item.args.kw_defaults]
            found[item.name] = ast.unparse(item.args)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = None
        elif isinstance(item, ast.Assign):
            found |= {target.id: None for target in item.targets if isinstance(target, ast.Name)}
    return found


def _has(package: Path, module: str, name: str) -> bool:
    """A module of that name, or the word in the module's source: some are made at run time."""
    path = package.joinpath(*module.split(".")[1:])
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if (path / f"{name}.py").is_file() or (path / name).is_dir():
        return True
    return source.is_file() and re.search(rf"\b{name}\b", source.read_text()) is not None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe(Path(sys.argv[1])), indent=1) + "\n")
