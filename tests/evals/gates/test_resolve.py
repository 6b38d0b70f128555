# SPDX-License-Identifier: Apache-2.0
"""Models of a hub: where they lie, and what identifies them."""

import pytest
from support.gates import resolved

from hileval.gates.declare import TaskError
from hileval.gates.resolve import snapshot, weights_sha
from hilgate.errors import CannotRunHereError


@pytest.fixture
def cached(tmp_path):
    """A snapshot as the hub's cache lays it out: links to files named by their hash."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for name in ("config.json", "model-00001.safetensors", "README.md"):
        (blobs / f"sha-of-{name}").write_text(name)
        (folder / name).symlink_to(blobs / f"sha-of-{name}")
    return folder


def test_links_stand_for_their_content_without_reading_it(cached):
    before = weights_sha(cached)
    (cached.parent.parent / "blobs" / "sha-of-model-00001.safetensors").unlink()
    assert weights_sha(cached) == before


@pytest.mark.parametrize(("name", "counts"), [("config.json", 1), ("model-00001.safetensors", 1), ("README.md", 0)])
def test_another_content_of_a_weight_is_another_identity(cached, tmp_path, name, counts):
    before = weights_sha(cached)
    (cached / name).unlink()
    (cached / name).symlink_to(tmp_path / "blobs" / "sha-of-something-else")
    linked = weights_sha(cached)
    (cached / name).unlink()
    (cached / name).write_text("no link: it is read")
    assert len({before, linked, weights_sha(cached)}) == (3 if counts else 1)


def test_a_model_that_is_not_here_cannot_run_here(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CannotRunHereError, match="not on this machine") as caught:
        snapshot("nobody/nothing", "")
    assert caught.value.where == "nobody/nothing@main"


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "generation_config.json", "modeling_x.py"])
def test_all_that_tokenizes_or_ends_an_answer_is_identified(gate, tmp_path, name):
    def identity():
        return resolved(gate, folder=tmp_path).identity.tokenizer

    found = [identity()]
    for content in ("one", "two"):
        (tmp_path / name).write_text(content)
        found.append(identity())
    assert len(set(found)) == 3


@pytest.mark.parametrize("trusted", [None, True, False])
def test_a_tokenizer_with_own_code_is_not_replaced_silently(trusted, gate, tmp_path):
    said = {} if trusted is None else {"trust_remote_code": trusted}
    hub = gate.model_copy(update={"weights": "hub", "engine_args": said})

    def identity():
        return resolved(hub, folder=tmp_path).identity

    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Own"}')
    assert identity()
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    if trusted is None:
        with pytest.raises(TaskError, match="code of its own") as caught:
            identity()
        assert "trust_remote_code" in caught.value.remedy
    else:
        assert identity()
