"""What vLLM 0.32 cannot do on a platform, as measured there: the error it gives. Pure.

Each entry is held against the run: an error that says something else is a failure, and so is an entry that has become
untrue. What a whole family cannot do is in `declared.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.families.declared import Family

WRONG = "log-probabilities are (off|not finite)|were NaN or infinite"
"""It answers, and wrongly."""


def not_here(platform: str, behaviour: str) -> str | None:
    """Why there is nothing to start; None where there is."""
    if platform == "cpu" and behaviour == "padded":
        return "vLLM's CPU platform captures no graphs, so no batch is padded"
    return None


def error(platform: str, family: Family, behaviour: str) -> str | None:
    """The error, as a regular expression, that vLLM is known to give; None where it is known to work."""
    if platform in family.cannot:
        return family.cannot[platform]
    if platform != "cpu":
        return None
    if behaviour == "spec" and family.states:
        # Its state updates on the CPU ignore which drafts were accepted. With vLLM's own attention they are as wrong:
        # Granite-4.0-H, drafts of 2, the first answer after the prompt off by 5.3 nats.
        return f"{WRONG}|stand-in"
    if behaviour in ("again", "prefix") and not family.attention and "ssm" in family.states:
        # With a prefix cache and no attention layer its block tables have one column, and Mamba-2 asks for the second.
        return "IndexError: index 1 is out of bounds"
    return None
