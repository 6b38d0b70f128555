"""lm-eval's idea of a model, over an engine. Imported when questions are asked: lm-eval takes seconds."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from hileval.task import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hileval.engines import Answer, Engine

Messages = list[dict[str, str]]
PASSED_ON = {"until", "do_sample", "temperature", "max_gen_toks"}


class Adapter(LM):  # type: ignore[misc]  # lm_eval ships no types
    """Keeps what lm-eval drops: `answers`, by the hash of the prompt."""

    tokenizer_name = "the model's own"

    def __init__(self, engine: Engine, max_tokens: int, template: Callable[[Messages], str] | None = None) -> None:
        super().__init__()
        self.answers: dict[str, Answer] = {}
        self._engine, self._max_tokens, self._template = engine, max_tokens, template

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Ask the engine everything at once.

        Raises:
            TaskError: The task wants arguments that are not passed on, or answers that are not greedy.
        """
        prompts = [request.args[0] for request in requests]
        arguments = requests[0].args[1]
        if any(request.args[1] != arguments for request in requests):
            raise TaskError("questions with different generation arguments", remedy="use one set for the task")
        if unknown := set(arguments) - PASSED_ON:
            raise TaskError(f"generation arguments {sorted(unknown)} are not passed on", remedy="remove them")
        if arguments.get("do_sample") or arguments.get("temperature", 0):
            raise TaskError("the gate compares greedy answers", remedy="set do_sample: false, temperature: 0")
        answers = self._engine.answer(prompts, max_tokens=self._max_tokens, stop=arguments.get("until", []))
        self.answers = dict(zip(map(_sha, prompts), answers, strict=True))
        return [answer.text for answer in answers]

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002
        """What lm-eval writes into its own results; ours hold its hash."""
        return ""

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation.

        Raises:
            TaskError: The gate's protocol is not chat.
        """
        if self._template is None or not add_generation_prompt:
            raise TaskError("a conversation without a template", remedy="use protocol: chat")
        return self._template(chat_history)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Not asked of a gate."""
        raise TaskError("the gate's tasks generate text", remedy="use a generate_until task")

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:  # noqa: ARG002
        """Not asked of a gate."""
        raise TaskError("the gate's tasks generate text", remedy="use a generate_until task")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
