"""Which GPUs a job gets, and folders that a step made hard to remove."""

from __future__ import annotations

import stat

import pytest
from support.agent import topology

from hilgate.agent import devices, workspace
from hilgate.errors import CannotRunHereError


@pytest.mark.parametrize(
    ("minors", "mine", "gpus", "nodes"),
    [
        ([128], "", 1, ["renderD128"]),
        ([128, 136], "", 2, ["renderD128", "renderD136"]),
        ([128, 136], "renderD136", 1, ["renderD136"]),
        ([128, 136, 144], "renderD144,renderD128", 2, ["renderD144", "renderD128"]),
        ([128, 136, 144], "renderD144 renderD128", 1, ["renderD144"]),
        ([], "", 0, []),
    ],
    ids=["all of one", "all of two", "mine", "mine in my order", "fewer than mine", "none"],
)
def test_a_job_gets_the_gpus_of_its_agent_and_no_more_than_its_step_has(tmp_path, minors, mine, gpus, nodes):
    found = devices.of_job(gpus, {devices.VARIABLE: mine}, **topology(tmp_path, minors))
    assert found.render_nodes == tuple(f"/dev/dri/{node}" for node in nodes)
    assert found.groups == ((tmp_path.stat().st_gid,) if nodes else ())


@pytest.mark.parametrize(
    ("minors", "mine", "gpus", "error"),
    [
        ([], "", 1, devices.MissingGpuError),
        ([128], "", 2, devices.MissingGpuError),
        ([128, 136], "", 1, CannotRunHereError),
        ([128], "renderD136", 1, CannotRunHereError),
        ([128], "card0", 1, CannotRunHereError),
        ([128], "../mem", 1, CannotRunHereError),
        ([128], "renderD128 renderD128", 1, CannotRunHereError),
    ],
    ids=["no GPU", "one is missing", "whose?", "not listed", "a card", "a path", "twice"],
)
def test_gpus_that_are_not_there_or_not_ours_are_refused(tmp_path, minors, mine, gpus, error):
    with pytest.raises(error):
        devices.of_job(gpus, {devices.VARIABLE: mine}, **topology(tmp_path, minors))


def test_a_gpu_without_its_device_node_is_missing(tmp_path):
    places = topology(tmp_path, [128])
    (tmp_path / "dev" / "dri" / "renderD128").unlink()
    with pytest.raises(devices.MissingGpuError, match="no device node"):
        devices.of_job(1, {}, **places)


def test_a_folder_that_a_step_closed_is_still_removed(tmp_path):
    closed = tmp_path / "scratch" / "a" / "b"
    closed.mkdir(parents=True)
    closed.chmod(0)
    closed.parent.chmod(stat.S_IXUSR)
    workspace.discard(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
