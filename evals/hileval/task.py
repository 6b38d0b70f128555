"""Tasks: lm-eval's stock task file overlaid with ours, and the identity of a run that follows from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import yaml

from hileval.declare import EVALS
from hileval.records import Identity
from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.declare import Gate


class TaskError(DeclarationError):
    """A task file is unreadable or names what does not exist."""


def resolve_task(path: Path, num_fewshot: int) -> dict[str, Any]:
    """The task as one dict: lm-eval's stock file, overlaid with ours, with absolute data files.

    Raises:
        TaskError: unreadable file, no `include`/`task`/`data.test`, missing stock task or data, examples wanted without
            training data.
    """
    try:
        ours = yaml.safe_load(path.read_text(encoding="utf-8"))
        include, name, data = ours.pop("include"), ours["task"], ours.pop("data")
        stock = importlib.metadata.distribution("lm_eval").locate_file(f"lm_eval/tasks/{include}")
        config: dict[str, Any] = yaml.safe_load(EVALS.joinpath(str(stock)).read_text(encoding="utf-8")) | ours
        files = {split: EVALS / data[split] for split in ("test", *sorted(set(data) - {"test"}))}
    except (OSError, yaml.YAMLError, KeyError, AttributeError, TypeError) as error:
        raise TaskError(
            f"not a task: {type(error).__name__} {error}", where=str(path), remedy="see evals/tasks/pocket_gsm8k.yaml"
        ) from error
    for file in files.values():
        if not file.is_file():
            raise TaskError(f"no data file {file.name}", where=str(path), remedy="python -m hileval.pocket questions")
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


def sha256_files(*files: Path) -> str:
    """sha256 over names and contents of files, in the given order; a missing file counts as absent."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b"absent"
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def identify(gate: Gate, config: dict[str, Any]) -> Identity:
    """What this run would have to share with a baseline."""
    folder = gate.path(gate.model)
    weights = sorted(folder.glob("*.safetensors"))
    portable = {key: value for key, value in config.items() if key != "dataset_kwargs"}
    return Identity(
        model=gate.model,
        weights=sha256_files(*weights, folder / "config.json"),
        revision=gate.revision,
        tokenizer=sha256_files(*(folder / name for name in ("tokenizer.json", "tokenizer_config.json"))),
        chat_template=sha256_files(folder / "chat_template.jinja"),
        protocol=gate.protocol,
        task=hashlib.sha256(json.dumps(portable, sort_keys=True).encode()).hexdigest(),
        num_fewshot=gate.num_fewshot,
        generation=json.dumps(config["generation_kwargs"] | {"max_gen_toks": gate.max_gen_toks}, sort_keys=True),
        lm_eval=importlib.metadata.version("lm_eval"),
    )
