# SPDX-License-Identifier: Apache-2.0
"""The families and published checkpoints, driven while the tests wait for them; and what to drive."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hilgate.conditions import NEEDS

if TYPE_CHECKING:
    from families.backends import Backend

EX_TEMPFAIL = 75
"""Exit status that hilgate takes for the machine's or the network's fault (`docs/reference/judging.md`)."""

SECONDS = 5400
"""Limit for one published checkpoint; its oracle scans in plain torch."""

PUBLISHED = "test_published.py"
ROWS = pytest.StashKey()
NOT_FETCHED = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("families")
    group.addoption("--family", action="append", default=[], help="only this family; may be repeated")
    group.addoption("--behaviour", action="append", default=[], help="only this behaviour; may be repeated")
    group.addoption("--backend", default="pagedkv", help="of evals/families/backends.yaml; without it ours")
    group.addoption("--seed", type=int, default=1, help="of the random schedules")
    group.addoption("--schedules", type=int, default=None, help="how many to draw for each family and engine")
    group.addoption("--published", action="append", default=[], help="a checkpoint of the table; may be repeated")
    group.addoption(
        "--checkpoint", action="append", default=[], help="only this one; without --published any checkpoint or folder"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Without a checkpoint it is an error, so it is run by who names it and by no one who names a folder.
    if collection_path.name != PUBLISHED:
        return None
    return not _named(config) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    # Here and not where tests are made: of a usage error in this place pytest prints the message alone.
    config = session.config
    if not _named(config):
        return
    if not (_chosen(config, "published") or _chosen(config, "checkpoint")):
        raise pytest.UsageError(
            "no checkpoint is named: add --checkpoint NAME, a folder or owner/name of the hub; "
            "ci/areas/models.yaml names those of the steps"
        )
    if find_spec("vllm") is None:
        return
    from families.family import UnknownNameError
    from families.published import UnfitError, select_rows

    options = {name: _chosen(config, name) for name in ("published", "checkpoint", "family", "behaviour")}
    try:
        config.stash[ROWS] = select_rows(**options)
    except (UnknownNameError, UnfitError) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell_of" in metafunc.fixturenames:
        _of_families(metafunc)
    elif "published_cell" in metafunc.fixturenames:
        _of_checkpoints(metafunc)


def _of_families(metafunc: pytest.Metafunc) -> None:
    if find_spec("vllm") is None:
        pytest.skip("needs package:vllm", allow_module_level=True)
    from families.family import UnknownNameError, columns

    try:
        _, families = _backend(metafunc.config)
        behaviours = _chosen(metafunc.config, "behaviour")
        cells = [(family, behaviour) for family in families for behaviour in columns(family, behaviours)]
    except UnknownNameError as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("cell_of", cells, ids=[f"{family}-{behaviour}" for family, behaviour in cells])


def _of_checkpoints(metafunc: pytest.Metafunc) -> None:
    pytest.importorskip("vllm", reason="needs package:vllm")
    cells = [(row, behaviour) for row in metafunc.config.stash[ROWS] for behaviour in row.behaviours]
    metafunc.parametrize("published_cell", cells, ids=[f"{row.name}-{behaviour}" for row, behaviour in cells])


def _backend(config: pytest.Config) -> tuple[Backend, list[str]]:
    """The backend that is asked for, and the families that have cells with it."""
    from families.backends import PLUGIN, backend_of, served_by
    from families.family import rows

    named = _chosen(config, "family")
    backend = backend_of(config.getoption("backend", None) or PLUGIN)
    return backend, served_by(backend, rows(named), named=bool(named))


@pytest.fixture(scope="session")
def drivers(request, tmp_path_factory):
    from families.family import columns
    from families.processes import GPU, Drivers

    behaviours = _chosen(request.config, "behaviour")
    backend, families = _backend(request.config)
    spec = {
        "backend": backend.name,
        "environment": dict(backend.environment),
        "behaviours": sorted({name for family in families for name in columns(family, behaviours)}),
        "fuzz": _fuzz(request.config),
    }
    # On a CPU one: the other cores of a gate have other steps, and the table is none that must wait for all of them.
    processes = min(4, os.cpu_count() or 1) if GPU else 1
    return Drivers(tmp_path_factory.mktemp("families"), families, spec, processes=processes)


@pytest.fixture(scope="session")
def published(request, tmp_path_factory):
    """What became of a row of published checkpoints; they are fetched one after the other, and then driven."""
    from families.published import PublishedCells

    driven = PublishedCells(
        tmp_path_factory.mktemp("published"), request.config.stash[ROWS], _fuzz(request.config), SECONDS
    )
    request.config.stash[NOT_FETCHED] = driven.not_fetched
    return driven


@pytest.fixture
def passes(record_property):
    """Records what a cell measured, and demands that it passed; one that did not run is skipped with its reason."""

    def demand(cell):
        record_property("seconds", round(cell.seconds, 2))
        for name, value in {**cell.numbers, **cell.labels}.items():
            record_property(name, value)
        if cell.needs:
            record_property(NEEDS, cell.needs)
        if cell.outcome == "did not run":
            pytest.skip(f"did not run here: {cell.reason}")
        assert cell.outcome == "pass", cell.reason

    return demand


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A failure that was seen stays one. Otherwise the table is not whole, through no fault of what it tests.
    if session.config.stash.get(NOT_FETCHED, None) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = EX_TEMPFAIL


def _named(config: pytest.Config) -> bool:
    """Whether the table of published checkpoints is asked for by its file."""
    return any(Path(word.partition("::")[0]).name == PUBLISHED for word in config.args)


def _fuzz(config: pytest.Config) -> dict[str, int]:
    from families.processes import GPU

    examples = config.getoption("schedules", None) or default_schedules(gpu=GPU)
    return {"seed": config.getoption("seed", 1), "examples": examples}


def default_schedules(*, gpu: bool) -> int:
    """Few where a person waits, many at night and before a release."""
    patient = os.environ.get("HILGATE_PROFILE") in ("nightly", "release")
    return (10 if patient else 2) * (3 if gpu else 1)


def _chosen(config: pytest.Config, option: str) -> list[str]:
    # Registered only where this folder is named on the command line.
    return config.getoption(option, None) or []


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory):
    """oracle_of(family, dtype): the oracle of a family; each is saved and loaded once a module."""
    import torch

    from families import checkpoints
    from families.family import FAMILIES
    from families.oracle import Oracle

    @cache
    def load(name, dtype="float32"):
        family, kind = FAMILIES[name], getattr(torch, dtype)
        folder = tmp_path_factory.mktemp(name)
        checkpoints.save(family, folder, kind)
        return Oracle.load(family, folder, kind)

    return load
