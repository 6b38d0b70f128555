"""lm-eval around an engine: the stock task makes the prompts, extracts the numbers and scores; we keep every answer."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

from hileval.broken import flags_of
from hileval.engines import require_model_files
from hileval.hub import snapshot
from hileval.records import Sample
from hileval.task import TaskError, identify, resolve_task
from hilgate.errors import HilgateError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hileval.adapter import Messages
    from hileval.declare import Gate
    from hileval.engines import Answer, Engine

INVALID = "[invalid]"
"""What lm-eval's filters give where they find nothing."""
STRICT, FLEXIBLE = "strict-match", "flexible-extract"


class ScoreError(RecordsError):
    """lm-eval's result lacks a filter or a question, or holds a score that is neither 0 nor 1."""


class TaskQuestions:
    """The questions of a gate's task on an engine; prompts do not depend on which of them are asked.

    Attributes:
        identity: What a baseline must share.
        available: How many questions the task holds.
        engine: Started when the first question is asked.
    """

    def __init__(self, gate: Gate, start: Callable[[], Engine]) -> None:
        """Read the task and its data; nothing expensive starts yet.

        Raises:
            DeclarationError: The task or its data cannot be read.
            ModelFilesError: The model folder lacks a file.
        """
        if gate.weights == "repository":
            require_model_files(gate.path(gate.model))
        self._gate = gate
        self._config = resolve_task(gate.path(gate.task), gate.num_fewshot)
        self.identity = identify(gate, self._config)
        self._task = _load(self._config)
        self.available = len(self._task.eval_docs)
        self._start = start
        self._template = chat_template(gate) if gate.protocol == "chat" else None
        self.engine: Engine | None = None

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:  # noqa: ARG002
        """Answers to these questions, in their order.

        Raises:
            ScoreError: lm-eval's result is not one binary score per question and filter.
            HilgateError: Whatever the engine raises.
        """
        self.engine = self.engine or self._start()
        from hileval.adapter import Adapter

        adapter = Adapter(self.engine, self._gate.max_gen_toks, self._template)
        records = _simple_evaluate(adapter, self._task, self._config["task"], ids, self._gate)
        by_id = {sample.doc_id: sample for sample in read_samples(records, adapter.answers, len(ids))}
        return [by_id[one] for one in ids]


def chat_template(gate: Gate) -> Callable[[Messages], str]:
    """Turns a conversation into the prompt that the model was trained on.

    Raises:
        CannotRunHereError: The model's tokenizer is not here.
        TaskError: It has no chat template.
    """
    import transformers

    folder = snapshot(gate.model, gate.revision) if gate.weights == "hub" else gate.path(gate.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise TaskError("the model has no chat template", where=gate.model, remedy="use protocol: completions")
    return lambda messages: str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _load(config: dict[str, Any]) -> Any:
    """lm-eval's task object, its data read.

    Raises:
        TaskError: lm-eval cannot make one.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar per look says nothing
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        return TaskManager(include_defaults=False).load([config])["tasks"][config["task"]]
    except Exception as error:
        raise TaskError(
            f"lm-eval cannot load it: {type(error).__name__}: {error}",
            where=config["task"],
            remedy="check the task file and its data",
        ) from error


def _simple_evaluate(adapter: Any, task: Any, name: str, ids: Sequence[int], gate: Gate) -> list[dict[str, Any]]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    try:
        result = lm_eval.simple_evaluate(
            model=adapter,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),  # else it reads its 13,000 stock files at each look
            gen_kwargs={"max_gen_toks": gate.max_gen_toks},
            apply_chat_template=gate.protocol == "chat",
            samples={name: sorted(ids)},
            log_samples=True,
            bootstrap_iters=0,
        )
    except HilgateError:
        raise
    except Exception as error:
        raise ScoreError(
            f"lm-eval stopped: {type(error).__name__}: {error}", where=name, remedy="check the task and its data"
        ) from error
    records: list[dict[str, Any]] = result["samples"][name]
    return records


def read_samples(records: list[dict[str, Any]], answers: dict[str, Answer], questions: int) -> tuple[Sample, ...]:
    """Join lm-eval's records (one per question and filter) with the engine's answers.

    Raises:
        ScoreError: a filter, question or answer is missing, or a score is not 0 or 1 (NaN is not).
    """
    by_filter = {name: {r["doc_id"]: r for r in records if r["filter"] == name} for name in (STRICT, FLEXIBLE)}
    ids = sorted(by_filter[STRICT])
    if len(ids) != questions or sorted(by_filter[FLEXIBLE]) != ids:
        raise ScoreError(
            f"{len(ids)} strict and {len(by_filter[FLEXIBLE])} flexible scores for {questions} questions",
            remedy="the task's data holds fewer questions than the gate declares, or a filter is missing",
        )
    return tuple(_sample(by_filter[STRICT][i], by_filter[FLEXIBLE][i], answers) for i in ids)


def _sample(strict: dict[str, Any], flexible: dict[str, Any], answers: dict[str, Answer]) -> Sample:
    answer = answers.get(strict["prompt_hash"])
    if answer is None:
        raise ScoreError(f"question {strict['doc_id']} has a score but no answer", remedy="repeat the run")
    return Sample(
        doc_id=strict["doc_id"],
        doc_hash=strict["doc_hash"],
        prompt_hash=strict["prompt_hash"],
        question=str(strict["doc"]["question"]),
        target=str(strict["target"]).rsplit("#### ", 1)[-1],
        text=answer.text,
        finish_reason=answer.finish_reason,
        n_tokens=answer.n_tokens,
        non_finite=answer.non_finite,
        strict=_extracted(strict),
        flexible=_extracted(flexible),
        strict_correct=_binary(strict),
        flexible_correct=_binary(flexible),
        flags=flags_of(answer.text, finish_reason=answer.finish_reason, non_finite=answer.non_finite),
    )


def _extracted(record: dict[str, Any]) -> str:
    found = record["filtered_resps"]
    return str(found[0]) if found else INVALID


def _binary(record: dict[str, Any]) -> bool:
    score = record.get("exact_match")
    if score not in (0, 1, 0.0, 1.0):
        raise ScoreError(
            f"question {record['doc_id']} ({record['filter']}): exact_match is {score!r}, not 0 or 1",
            remedy="the metric of the task is not a binary exact match",
        )
    return bool(score)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
