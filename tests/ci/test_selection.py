"""Selection by globs, with reasons; adding a changed file never removes anything."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hilgate.declare import load
from hilgate.model import Area
from hilgate.selection import claimed_by, select

REPOSITORY = Path(__file__).resolve().parents[2]
STEP = {"key": "s", "label": "l", "command": "c", "devices": ("cpu",), "evidence": "junit", "timeout_minutes": 1}


def area(name, *paths, always=False):
    return Area(area=name, title="T", why="W", paths=paths, always=always, steps=(STEP,))


AREAS = (
    area("kernels", "kernels/", "!kernels/audit/", "!*.md"),
    area("audit", "kernels/audit/"),
    area("hygiene", "*.md", "LICENSE", always=True),
)


def test_reason_names_the_file():
    reasons = select(AREAS, ["kernels/layout.py"]).reasons
    assert reasons == {"kernels": "kernels/layout.py changed", "hygiene": "runs on every change"}


def test_several_files_are_counted():
    assert select(AREAS, ["kernels/b.py", "kernels/a.py"]).reasons["kernels"] == "kernels/a.py and 1 more changed"


def test_docs_alone_run_what_always_runs():
    assert set(select(AREAS, ["README.md", "kernels/README.md"]).reasons) == {"hygiene"}


def test_file_that_no_area_claims_runs_everything():
    selection = select(AREAS, ["pyproject.toml"])
    assert selection.unclaimed == ("pyproject.toml",)
    assert set(selection.reasons) == {"kernels", "audit", "hygiene"}
    assert selection.reasons["audit"] == "pyproject.toml changed and no area claims it, so everything runs"


def test_without_base_everything_runs_and_without_change_only_always():
    assert set(select(AREAS, None).reasons) == {"kernels", "audit", "hygiene"}
    assert set(select(AREAS, []).reasons) == {"hygiene"}


def test_later_globs_win_as_in_gitignore():
    assert claimed_by(AREAS[0], ["kernels/a.py", "kernels/audit/b.py", "kernels/x/README.md"]) == ["kernels/a.py"]


PARTS = st.sampled_from(["kernels", "pagedkv", "audit", "tests", "ci", "docs", "a.py", "README.md", "agents.yaml", "ü"])
FILES = st.lists(st.builds("/".join, st.lists(PARTS, min_size=1, max_size=4)), max_size=6)
DECLARED = load(REPOSITORY).areas


@settings(max_examples=60, deadline=None)
@given(files=FILES, more=FILES)
def test_one_more_file_never_removes_an_area(files, more):
    for areas in (AREAS, DECLARED):
        before = select(areas, files)
        after = select(areas, [*files, *more])
        assert set(before.reasons) <= set(after.reasons)
        assert set(before.unclaimed) <= set(after.unclaimed)
        assert all(after.reasons.values())


def test_repository_claims_what_it_should():
    def selected(*files):
        return set(select(DECLARED, files).reasons)

    everything = {area.area for area in DECLARED}
    assert selected("pyproject.toml") == everything
    assert selected("ci/agents.yaml") == everything
    assert selected("requirements/laptop.txt") == everything
    assert selected("README.md") == {"hygiene"}
    assert {"kernels", "codeobjects", "models", "accuracy"} <= selected("kernels/pagedkv/layout.py")
    assert "kernels" not in selected("kernels/pagedkv/audit/budgets.py")
    for area_ in everything:
        assert area_ in selected(f"ci/areas/{area_}.yaml")
