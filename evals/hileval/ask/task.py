# SPDX-License-Identifier: Apache-2.0
"""Questions of a gate, the folder of its data, and the identity of a run.

A model of a hub is found in this machine's cache and identified by what the hub says its files contain.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hileval.gates.declare import EVALS
from hileval.records.records import Identity
from hilgate.errors import CannotRunHereError, DeclarationError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hileval.gates.declare import Gate
    from hileval.gates.resolve import ResolvedGate

WEIGHTS = ("*.safetensors", "config.json", "*.index.json")
ALSO = ("generation_config.json", "tokenizer.model", "tiktoken.model", "*.py")
"""What else may turn a question into tokens or end an answer, where a model has it: remote code is read too."""
INVALID = "[invalid]"
"""What a filter gives where it finds nothing."""


class TaskError(DeclarationError):
    """A task file is unreadable or names what does not exist."""


class ScoreError(RecordsError):
    """A result lacks a filter, a question or an answer, or holds a score that is neither 0 nor 1."""


def data_folder(variable: str | None, path: Path) -> Path:
    """Where the documents of the task in `path` are: in evals/, or where an environment variable says.

    Raises:
        CannotRunHereError: The variable is not set, or names no folder.
    """
    if variable is None:
        return EVALS
    folder = Path(os.environ.get(variable, ""))
    if not os.environ.get(variable) or not folder.is_dir():
        raise CannotRunHereError(
            f"{variable} names no folder", where=str(path), remedy=f"set {variable} to the folder that holds its data"
        )
    return folder


def weights_sha(folder: Path) -> str:
    """sha256 over names and contents of weights and configuration of a hub's model.

    The cache keeps each file under the hash of its content and links to it, so hundreds of gigabytes need not be read:
    the name that a link points to stands for the content. A file that is no link is read.
    """
    digest = hashlib.sha256()
    for file in sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}):
        content = file.readlink().name if file.is_symlink() else hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def sha256_files(*files: Path) -> str:
    """sha256 over names and contents of files, in the given order; a missing file counts as absent."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b"absent"
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _require_decided(gate: Gate, folder: Path) -> None:
    """A tokenizer with code of its own is replaced by another one, in silence, where that code may not run."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return  # whoever loads the tokenizer says what is wrong with it
    if isinstance(config, dict) and "auto_map" in config and "trust_remote_code" not in gate.engine_args:
        raise TaskError(
            "the model's tokenizer has code of its own, and the gate does not say whether it runs",
            where=gate.model,
            remedy="read that code, pin `revision`, and write `trust_remote_code: true` (or false) into `engine_args`",
        )


def identify(
    resolved: ResolvedGate,
    *,
    task: dict[str, Any],
    tokenizer: Iterable[str],
    generation: dict[str, Any],
    **of_harness: str,
) -> Identity:
    """What a run would have to share with a baseline.

    Args:
        resolved: The gate.
        task: The task without paths of this machine.
        tokenizer: Names of the files that turn questions into the model's input.
        generation: Arguments of generation.
        of_harness: `lm_eval`, its version, and `fewshot` where it is not the default.

    Raises:
        TaskError: The tokenizer has code of its own, and the gate does not say whether that runs.
    """
    gate, folder = resolved.declared, resolved.folder
    if gate.weights == "hub":
        _require_decided(gate, folder)
    also = sorted(file for pattern in ALSO for file in folder.glob(pattern))
    drawn = EVALS / "hileval/engines/worker.py"
    weights = [drawn] if gate.weights == "drawn" else sorted(folder.glob("*.safetensors"))
    return Identity(
        model=gate.model,
        revision=gate.revision,
        weights=weights_sha(folder) if gate.weights == "hub" else sha256_files(*weights, folder / "config.json"),
        tokenizer=sha256_files(*(folder / name for name in tokenizer), *also),
        chat_template=sha256_files(folder / "chat_template.jinja"),
        protocol=gate.protocol,
        task=hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest(),
        num_fewshot=gate.num_fewshot,
        generation=json.dumps(generation | {"max_gen_toks": gate.max_gen_toks}, sort_keys=True),
        **of_harness,
    )
