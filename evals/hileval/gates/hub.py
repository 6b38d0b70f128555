"""Models of a hub: found in this machine's cache, and identified by what the hub says their files contain."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hilgate.errors import CannotRunHereError

WEIGHTS = ("*.safetensors", "config.json", "*.index.json")


def snapshot(model: str, revision: str) -> Path:
    """Folder of a model in the hub's cache, fetched if this machine may.

    Raises:
        CannotRunHereError: It is neither here nor can it be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision or None))
    except Exception as error:
        raise CannotRunHereError(
            f"the model is not on this machine: {type(error).__name__}",
            where=f"{model}@{revision or 'main'}",
            remedy="run it on an agent that has the hub's cache, or fetch the model first",
        ) from error


def weights_sha(folder: Path) -> str:
    """sha256 over names and contents of weights and configuration.

    The cache keeps each file under the hash of its content and links to it, so hundreds of gigabytes need not be read:
    the name that a link points to stands for the content. A file that is no link is read.
    """
    digest = hashlib.sha256()
    for file in sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}):
        content = file.readlink().name if file.is_symlink() else hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()
