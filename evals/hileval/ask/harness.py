# SPDX-License-Identifier: Apache-2.0
"""lm-eval around an engine: its stock task makes the prompts, extracts the numbers and scores; every answer is kept.

Imported when questions are asked: lm-eval takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from hileval.engines import bounded
from hileval.gates.declare import TaskError
from hileval.records.answers import INVALID, Sample, ScoreError, flags_of
from hilgate.errors import HilgateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.engines import Answer, Engine
    from hileval.gates.declare import Gate
    from hileval.gates.resolve import ResolvedGate


STRICT, FLEXIBLE = "strict-match", "flexible-extract"


Messages = list[dict[str, str]]


class Chat:
    """A model's chat template and its tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, messages: Messages) -> str:
        """The prompt of a conversation."""
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def tokens(self, text: str) -> list[int]:
        """Tokens of a prompt. The template wrote the special ones; an engine given the text would add a second BOS."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


PASSED_ON = {"until", "do_sample", "temperature", "max_gen_toks"}


class Adapter(LM):  # type: ignore[misc]  # lm_eval ships no types
    """Keeps what lm-eval drops: `answers`, by the hash of the prompt."""

    tokenizer_name = "the model's own"

    def __init__(self, engine: Engine, max_tokens: int, chat: Chat | None = None) -> None:
        super().__init__()
        self.answers: dict[str, Answer] = {}
        self._engine, self._max_tokens, self._chat = engine, max_tokens, chat

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Ask the engine everything at once.

        Raises:
            TaskError: The task wants arguments that are not passed on, or answers that are not greedy.
            EngineError: An answer is longer than was asked for.
        """
        prompts = [request.args[0] for request in requests]
        arguments = requests[0].args[1]
        if any(request.args[1] != arguments for request in requests):
            raise TaskError("questions with different generation arguments", remedy="use one set for the task")
        if unknown := set(arguments) - PASSED_ON:
            raise TaskError(f"generation arguments {sorted(unknown)} are not passed on", remedy="remove them")
        if arguments.get("do_sample") or arguments.get("temperature", 0):
            raise TaskError("the gate compares greedy answers", remedy="set do_sample: false, temperature: 0")
        shown = [self._chat.tokens(prompt) for prompt in prompts] if self._chat else prompts
        raw = self._engine.answer(shown, max_tokens=self._max_tokens, stop=arguments.get("until", []))
        answers = bounded(raw, self._max_tokens)
        self.answers = dict(zip(map(_sha, prompts), answers, strict=True))
        return [answer.text for answer in answers]

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002
        """The template for lm-eval's own results, which nobody reads; the identity of ours holds its hash."""
        return ""

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation.

        Raises:
            TaskError: The gate's protocol is not chat.
        """
        if self._chat is None or not add_generation_prompt:
            raise TaskError(
                "the task is a conversation, and the gate has no chat template", remedy="use protocol: chat"
            )
        return self._chat.text(chat_history)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Not asked of a gate."""
        raise TaskError("the gate's tasks generate text", remedy="use a generate_until task")

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:  # noqa: ARG002
        """Not asked of a gate."""
        raise TaskError("the gate's tasks generate text", remedy="use a generate_until task")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def documents_of(gate: ResolvedGate) -> Any:
    """The rows of the task's own test set, in their order.

    Raises:
        TaskError: The task or its data cannot be read.
    """
    return _load(gate.questions).eval_docs


def _load(config: dict[str, Any]) -> Any:
    """lm-eval's task object, its data read.

    Raises:
        TaskError: lm-eval cannot make one.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets  # reads the environment when it is imported
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        # What `datasets` keeps in the home folder goes by a file's name and time, so nothing is taken from there.
        with tempfile.TemporaryDirectory(prefix="hileval-") as folder:
            kwargs = {**config["dataset_kwargs"], "cache_dir": folder, "keep_in_memory": True}
            return TaskManager(include_defaults=False).load([config | {"dataset_kwargs": kwargs}])["tasks"][
                config["task"]
            ]
    except Exception as error:
        raise TaskError(
            f"lm-eval cannot load it: {type(error).__name__}: {error}",
            where=config["task"],
            remedy="check the task file and its data",
        ) from error


class TaskQuestions:
    """The questions of a gate's task on an engine; prompts do not depend on which of them are asked.

    Attributes:
        identity: What a baseline must share.
        available: How many questions the task holds.
        engine: Started when the first question is asked.
    """

    def __init__(self, gate: ResolvedGate) -> None:
        """Read the task and its data; nothing expensive starts yet.

        Raises:
            DeclarationError: The task or its data cannot be read.
            ModelFilesError: The model folder lacks a file.
        """
        self._gate, self._start = gate.declared, gate.start
        self.identity = gate.identity
        self._name = gate.questions["task"]
        self._task = _load(gate.questions)
        self.available = len(self._task.eval_docs)
        self._chat = chat_of(gate) if gate.declared.protocol == "chat" else None
        self.engine: Engine | None = None

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:  # noqa: ARG002
        """Answers to these questions, in their order.

        Raises:
            ScoreError: lm-eval's result is not one binary score per question and filter.
            HilgateError: Whatever the engine raises.
        """
        self.engine = self.engine or self._start()
        adapter = Adapter(self.engine, self._gate.max_gen_toks, self._chat)
        records = _simple_evaluate(adapter, self._task, self._name, ids, self._gate)
        by_id = {sample.doc_id: sample for sample in read_samples(records, adapter.answers, len(ids))}
        return [by_id[doc_id] for doc_id in ids]


def chat_of(gate: ResolvedGate) -> Chat:
    """The chat template and tokenizer of a gate's model.

    Raises:
        CannotRunHereError: The model's tokenizer is not here.
        TaskError: It has no chat template.
    """
    import transformers

    declared = gate.declared
    trusted = bool(declared.engine_args.get("trust_remote_code", False))
    tokenizer = transformers.AutoTokenizer.from_pretrained(gate.folder, trust_remote_code=trusted)
    if not tokenizer.chat_template:
        raise TaskError("the model has no chat template", where=declared.model, remedy="use protocol: completions")
    return Chat(tokenizer)


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
            **gate.turns,
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
            remedy="check that the task's data has every question, and that the task has both filters",
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
        target_hash=strict.get("target_hash", ""),
        generation=json.dumps(strict["arguments"][0][1], sort_keys=True) if "arguments" in strict else "",
    )


def _extracted(record: dict[str, Any]) -> str:
    extracted = record["filtered_resps"]
    return str(extracted[0]) if extracted else INVALID


def _binary(record: dict[str, Any]) -> bool:
    score = record.get("exact_match")
    if score not in (0, 1, 0.0, 1.0):
        raise ScoreError(
            f"question {record['doc_id']} ({record['filter']}): exact_match is {score!r}, not 0 or 1",
            remedy="give the task a metric that is 0 or 1: a binary exact match",
        )
    return bool(score)
