"""Engines: prompts in, answers out. vLLM in process, a server, and transformers as a second opinion."""

from hileval.engines.engine import Answer, Engine, EngineError, ModelFilesError, Prompt, require_model_files

__all__ = ["Answer", "Engine", "EngineError", "ModelFilesError", "Prompt", "require_model_files"]
