# SPDX-License-Identifier: Apache-2.0
"""A drafter that drafts what a test has written: right tokens, then wrong ones, of every number in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

DRAFTS = 7
"""Most drafts of a step: with the token before them eight are verified."""


class ScriptedDrafter:
    """What vLLM's speculative method `custom_class` names; engines of this process alone can be scripted."""

    texts: ClassVar[list[tuple[int, ...]]] = []
    """Requests with the answers that they have had; of others nothing is drafted."""
    verified: ClassVar[set[tuple[int, int]]] = set()
    """Numbers of drafts, and how many of them were right, that have been proposed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what vLLM gives, and need nothing of it."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Draft for each request of a step.

        Args:
            sampled_token_ids: Tokens that each has just got; none while it is in its prompt.
            num_tokens_no_spec: [requests] tokens of each so far.
            token_ids_cpu: [requests, longest] these tokens.
        """
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            begun = tuple(token_ids_cpu[row, :length].tolist())
            text = next((text for text in self.texts if text[:length] == begun), ())
            rest = list(text[length : length + 1 + length % DRAFTS]) if sampled else []
            right = length * 5 // 2 % (len(rest) + 1)
            if rest:
                self.verified.add((len(rest), right))
            drafts.append(rest[:right] + [token ^ 1 for token in rest[right:]])
        return drafts
