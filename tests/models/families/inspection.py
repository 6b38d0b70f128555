"""Let vLLM look at a model class in this process.

vLLM inspects a class of its registry in a process of its own, so as not to initialise CUDA in the parent; that costs
11 s on a machine that has not done it before. A driver that runs the engine itself has nothing to protect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.families.family import Family


def register(family: Family) -> bool:
    """Replace the registry's promise of the family's class by the class itself; call it before the engine starts.

    Returns:
        Whether vLLM knows the architecture. Where it does not, starting the engine says so in vLLM's words.

    Raises:
        ImportError: vLLM's module of the class needs a package that is missing.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(family.architecture)
    if known is None:
        return False
    ModelRegistry.register_model(family.architecture, known.load_model_cls())
    return True
