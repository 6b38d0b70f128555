"""Tasks: lm-eval's stock task file overlaid with ours, and the identity of a run that follows from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hileval.declare import EVALS
from hileval.hub import snapshot, weights_sha
from hileval.records import Identity
from hilgate.errors import CannotRunHereError, DeclarationError

if TYPE_CHECKING:
    from hileval.declare import Gate


class TaskError(DeclarationError):
    """A task file is unreadable or names what does not exist."""


def resolve_task(path: Path, num_fewshot: int) -> dict[str, Any]:
    """The task as one dict: lm-eval's stock file, overlaid with ours, with absolute data files.

    Raises:
        TaskError: unreadable file, no `include`/`task`/`data.test`, missing stock task or data, examples wanted without
            training data.
        CannotRunHereError: the data is not on this machine.
    """
    try:
        ours = yaml.safe_load(path.read_text(encoding="utf-8"))
        include, name, data = ours.pop("include"), ours["task"], ours.pop("data")
        folder = data_folder(ours.pop("data_folder", None), path)
        stock = importlib.metadata.distribution("lm_eval").locate_file(f"lm_eval/tasks/{include}")
        config: dict[str, Any] = yaml.safe_load(EVALS.joinpath(str(stock)).read_text(encoding="utf-8")) | ours
        files = {split: folder / data[split] for split in ("test", *sorted(set(data) - {"test"}))}
    except (OSError, yaml.YAMLError, KeyError, AttributeError, TypeError) as error:
        raise TaskError(
            f"not a task: {type(error).__name__} {error}", where=str(path), remedy="see evals/tasks/pocket_gsm8k.yaml"
        ) from error
    for file in files.values():
        if not file.is_file():
            raise TaskError(
                f"no data file {file.name}",
                where=str(path),
                remedy="python -m hileval.pocket questions makes those of pocket models",
            )
    if num_fewshot and "train" not in files:
        raise TaskError(f"{num_fewshot} examples without data.train", where=str(path), remedy="name the training file")
    if not num_fewshot:
        config.pop("training_split", None)
        config.pop("fewshot_split", None)
    else:
        # The stock sampler walks one random stream over the questions, so a subset gets other prompts than the whole.
        config["fewshot_config"] = {"sampler": "first_n"}
    config.pop("dataset_name", None)
    config |= {"task": name, "dataset_path": "json", "num_fewshot": num_fewshot}
    config["dataset_kwargs"] = {"data_files": {split: str(file) for split, file in files.items()}}
    return config


def data_folder(variable: str | None, path: Path) -> Path:
    """Where the task's data files are: in evals/, or where an environment variable says (data we may not carry).

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


def sha256_files(*files: Path) -> str:
    """sha256 over names and contents of files, in the given order; a missing file counts as absent."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b"absent"
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def identify(gate: Gate, config: dict[str, Any]) -> Identity:
    """What this run would have to share with a baseline."""
    hub = gate.weights == "hub"
    folder = snapshot(gate.model, gate.revision) if hub else gate.path(gate.model)
    weights = sorted(folder.glob("*.safetensors"))
    portable = {key: value for key, value in config.items() if key != "dataset_kwargs"}
    return Identity(
        model=gate.model,
        weights=weights_sha(folder) if hub else sha256_files(*weights, folder / "config.json"),
        revision=gate.revision,
        tokenizer=sha256_files(*(folder / name for name in ("tokenizer.json", "tokenizer_config.json"))),
        chat_template=sha256_files(folder / "chat_template.jinja"),
        protocol=gate.protocol,
        task=hashlib.sha256(json.dumps(portable, sort_keys=True).encode()).hexdigest(),
        num_fewshot=gate.num_fewshot,
        generation=json.dumps(config["generation_kwargs"] | {"max_gen_toks": gate.max_gen_toks}, sort_keys=True),
        lm_eval=importlib.metadata.version("lm_eval"),
    )
