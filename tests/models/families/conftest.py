"""The families, driven while the tests wait for them; and what to drive."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("families")
    group.addoption("--family", action="append", default=[], help="only this family; may be repeated")
    group.addoption("--behaviour", action="append", default=[], help="only this behaviour; may be repeated")
    group.addoption("--seed", type=int, default=1, help="of the random schedules")
    group.addoption("--schedules", type=int, default=None, help="how many to draw for each family and engine")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell_of" not in metafunc.fixturenames:
        return
    pytest.importorskip("vllm", reason="families run in vLLM")
    from models.families.table import UnknownNameError, columns, rows

    families, behaviours = (_chosen(metafunc.config, option) for option in ("family", "behaviour"))
    try:
        cells = [(family, behaviour) for family in rows(families) for behaviour in columns(family, behaviours)]
    except UnknownNameError as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("cell_of", cells, ids=[f"{family}-{behaviour}" for family, behaviour in cells])


@pytest.fixture(scope="session")
def fleet(request, tmp_path_factory):
    from models import engine
    from models.families.fleet import Fleet
    from models.families.table import columns, rows

    behaviours = _chosen(request.config, "behaviour")
    families = rows(_chosen(request.config, "family"))
    fuzz = {
        "seed": request.config.getoption("seed", 1),
        "examples": request.config.getoption("schedules", None) or default_schedules(gpu=engine.GPU),
    }
    spec = {"behaviours": sorted({name for family in families for name in columns(family, behaviours)}), "fuzz": fuzz}
    processes = min(4 if engine.GPU else 2, os.cpu_count() or 1)
    return Fleet(tmp_path_factory.mktemp("families"), families, spec, processes=processes)


def default_schedules(*, gpu: bool) -> int:
    """Few where a person waits, many at night and before a release."""
    patient = os.environ.get("HILGATE_PROFILE") in ("nightly", "release")
    return (10 if patient else 2) * (3 if gpu else 1)


def _chosen(config: pytest.Config, option: str) -> list[str]:
    # Registered only where this folder is named on the command line.
    return config.getoption(option, None) or []
