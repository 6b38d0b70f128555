# SPDX-License-Identifier: Apache-2.0
"""Import the accuracy configurations of vLLM as gates.

Two formats: `tests/evals/gsm8k/configs/*.yaml` (a threshold and an absolute tolerance) and
`.buildkite/lm-eval-harness/configs/*.yaml` (values per metric and a relative one). What they promise becomes the floor
of the gate; the paired rule comes on top as soon as there is a baseline. A key that means something we cannot do is
refused by name, because a gate that ignores half of its configuration is another gate.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field, ValidationError

from hileval.gates.declare import Gate, Published
from hileval.gates.rule import BrokenLimits
from hilgate.errors import DeclarationError
from hilgate.model import Scalar, StrictModel, first_problem

if TYPE_CHECKING:
    from pathlib import Path

TASK, QUESTIONS = "tasks/gsm8k.yaml", 1319
BROKEN = BrokenLimits(max_rate=0.05, alpha=0.001, min_count=3)
GREEDY = {"temperature", "top_p", "top_k", "do_sample"}


class ForeignConfigError(DeclarationError):
    """Not one of the two formats, or one that asks for something that a gate here cannot do."""


class _Gsm8k(StrictModel):
    """`tests/evals/gsm8k/configs/*.yaml`; its scorer takes the last number of the text (our flexible filter)."""

    model_name: str
    accuracy_threshold: float = Field(gt=0, le=1)
    tolerance: float = Field(default=0.08, ge=0, lt=1)
    num_questions: int = Field(default=1319, ge=1)
    num_fewshot: int = Field(default=5, ge=0)
    max_tokens: int = Field(default=256, ge=1)
    server_args: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    startup_max_wait_seconds: float = Field(default=600, gt=0)
    rocm_request_timeout_seconds: float | None = Field(default=None, gt=0)


class _Metric(StrictModel):
    name: str
    value: float = Field(gt=0, le=1)


class _Task(StrictModel):
    name: str
    metrics: tuple[_Metric, ...] = Field(min_length=1)


class _LmEval(StrictModel):
    """`.buildkite/lm-eval-harness/configs/*.yaml`."""

    model_name: str
    backend: str = "vllm"
    tasks: tuple[_Task, ...] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)
    num_fewshot: int = Field(default=5, ge=0)
    rtol: float = Field(default=0.08, ge=0, lt=1)
    max_model_len: int = Field(default=4096, ge=1)
    enforce_eager: bool | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool = False
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    batch_size: str | int = "auto"
    gen_kwargs: str = ""
    env_vars: dict[str, str] = Field(default_factory=dict)


def read_foreign(path: Path, gpus: int = 1) -> tuple[str, Gate]:
    """The gate that a configuration of vLLM describes, and a key for it.

    Args:
        path: The YAML file.
        gpus: Tensor-parallel size where the file does not say (the lm-eval format never does).

    Raises:
        ForeignConfigError: Unreadable, an unknown key, or something that a gate cannot do; names the key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ForeignConfigError(
            f"cannot be read: {str(error).splitlines()[0]}", where=str(path), remedy="name a YAML file"
        ) from error
    if not isinstance(content, dict) or not {"accuracy_threshold", "tasks"} & set(content):
        raise ForeignConfigError(
            "neither `accuracy_threshold` nor `tasks`: not an accuracy configuration of vLLM",
            where=str(path),
            remedy="see tests/evals/gsm8k/configs or .buildkite/lm-eval-harness/configs of vLLM",
        )
    try:
        if "accuracy_threshold" in content:
            gate = _from_gsm8k(_Gsm8k.model_validate(content), path, gpus)
        else:
            gate = _from_lm_eval(_LmEval.model_validate(content), path, gpus)
    except ValidationError as error:
        raise ForeignConfigError(
            first_problem(error), where=str(path), remedy="a gate must not ignore a key of its configuration"
        ) from error
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).strip("-"), gate


def as_yaml(key: str, gate: Gate) -> str:
    """The gate as an entry of gates.yaml."""
    written = gate.model_dump(mode="json", exclude_defaults=True) | {"broken": gate.broken.model_dump()}
    text: str = yaml.safe_dump({key: written}, sort_keys=False, allow_unicode=True, width=110)
    return "".join(f"  {line}\n" for line in text.splitlines())


def _from_gsm8k(config: _Gsm8k, path: Path, gpus: int) -> Gate:
    arguments = _server_arguments(config.server_args, path)
    backend = arguments.pop("attention_backend", "pagedkv")
    size = arguments.setdefault("tensor_parallel_size", gpus)
    metric = f"last number, {config.num_fewshot} examples"
    return _gate(
        config.model_name,
        path,
        Published(
            value=config.accuracy_threshold,
            kind="threshold",
            metric=metric,
            n=config.num_questions,
            source=path.name,
        ),
        floor=config.accuracy_threshold - config.tolerance,
        filter="flexible",
        num_fewshot=config.num_fewshot,
        max_gen_toks=config.max_tokens,
        engine_args=arguments,
        attention_backend=backend,
        env=config.env,
        gpus=int(str(size)),
    )


def _from_lm_eval(config: _LmEval, path: Path, gpus: int) -> Gate:
    if [task.name for task in config.tasks] != ["gsm8k"]:
        names = ", ".join(task.name for task in config.tasks)
        raise ForeignConfigError(f"tasks: {names}; only gsm8k is gated here", where=str(path), remedy="take it out")
    if config.fewshot_as_multiturn:
        raise ForeignConfigError(
            "fewshot_as_multiturn: examples are one message here",
            where=str(path),
            remedy="set it to false: another prompt",
        )
    if config.backend != "vllm":
        raise ForeignConfigError(f"backend: {config.backend!r} is not served here", where=str(path), remedy="vllm")
    values = {metric.name: metric.value for metric in config.tasks[0].metrics}
    filters = {"exact_match,strict-match": "strict", "exact_match,flexible-extract": "flexible"}
    known = {filters[name]: value for name, value in values.items() if name in filters}
    if not known:
        raise ForeignConfigError(f"no known metric in {', '.join(values)}", where=str(path), remedy=", ".join(filters))
    best = max(known, key=known.__getitem__)  # a chat model may fail one of the filters by its style alone
    arguments: dict[str, Scalar] = {"max_model_len": config.max_model_len, "tensor_parallel_size": gpus}
    optional = {"enforce_eager": config.enforce_eager, "kv_cache_dtype": config.kv_cache_dtype}
    arguments |= {name: value for name, value in optional.items() if value is not None}
    arguments |= {"trust_remote_code": True} if config.trust_remote_code else {}
    first = "" if config.limit is None else ", the first questions"
    metric = f"{best}, {config.num_fewshot} examples{first}"
    return _gate(
        config.model_name,
        path,
        Published(value=known[best], kind="threshold", metric=metric, n=config.limit or QUESTIONS, source=path.name),
        floor=known[best] * (1 - config.rtol),
        filter=best,
        num_fewshot=config.num_fewshot,
        max_gen_toks=_max_gen_toks(config.gen_kwargs, path),
        engine_args=arguments,
        env=config.env_vars,
        gpus=gpus,
        protocol="chat" if config.apply_chat_template else "completions",
    )


def _gate(model: str, path: Path, published: Published, *, floor: float, **fields: Any) -> Gate:
    fields.setdefault("attention_backend", "pagedkv")
    return Gate(
        title=f"{model}, from {path.name}",
        model=model,
        weights="hub",
        task=TASK,
        engine="vllm",
        floor=round(floor, 6),
        published=(published,),
        broken=BROKEN,
        baseline=f"baselines/{path.stem.lower()}.json",
        **fields,
    )


def _server_arguments(text: str, path: Path) -> dict[str, Scalar]:
    """`--max-model-len 4096 --enforce-eager` as arguments; a word that is no option is refused."""
    words = shlex.split(text)
    found: dict[str, Scalar] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ForeignConfigError(f"server_args: {word!r} follows no option", where=str(path), remedy="quote it")
        name, assigned, value = word[2:].partition("=")
        if not assigned and words and not words[0].startswith("--"):
            assigned, value = "=", words.pop(0)
        if assigned:
            found[name.replace("-", "_")] = _value(value)
        elif name.startswith("no-"):
            found[name[3:].replace("-", "_")] = False
        else:
            found[name.replace("-", "_")] = True
    return found


def _value(text: str) -> Scalar:
    """A number where it is one; JSON objects stay text, as vLLM's own options take them."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _max_gen_toks(text: str, path: Path) -> int:
    pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if pairs.get("do_sample", "false").lower() == "true" or float(pairs.get("temperature", "0")) != 0:
        raise ForeignConfigError(
            "gen_kwargs: answers are sampled, and the gate compares greedy ones",
            where=str(path),
            remedy="temperature=0",
        )
    if unknown := set(pairs) - GREEDY - {"max_gen_toks"}:
        raise ForeignConfigError(
            f"gen_kwargs: {', '.join(sorted(unknown))} cannot be passed on", where=str(path), remedy="take it out"
        )
    return int(pairs.get("max_gen_toks", "256"))
