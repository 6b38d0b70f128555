import pytest

from hileval.gates.hub import snapshot, weights_sha
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


@pytest.mark.parametrize("name", ["config.json", "model-00001.safetensors"])
def test_another_content_is_another_identity(cached, tmp_path, name):
    before = weights_sha(cached)
    (cached / name).unlink()
    (cached / name).symlink_to(tmp_path / "blobs" / "sha-of-something-else")
    assert weights_sha(cached) != before


def test_what_is_no_weight_does_not_count(cached):
    before = weights_sha(cached)
    (cached / "README.md").unlink()
    assert weights_sha(cached) == before


def test_files_that_are_no_links_are_read(tmp_path):
    (tmp_path / "config.json").write_text("a")
    before = weights_sha(tmp_path)
    (tmp_path / "config.json").write_text("b")
    assert weights_sha(tmp_path) != before


def test_a_model_that_is_not_here_cannot_run_here(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CannotRunHereError, match="not on this machine") as caught:
        snapshot("nobody/nothing", "")
    assert caught.value.where == "nobody/nothing@main"
