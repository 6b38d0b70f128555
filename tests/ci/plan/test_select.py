# SPDX-License-Identifier: Apache-2.0
"""Selection by globs and by imports, with reasons; adding a changed file never removes anything."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hilgate.declare.imports import Imports, build, find
from hilgate.declare.load import load
from hilgate.git import tracked_files
from hilgate.model.declaration import Area, DeclaredArea
from hilgate.plan.select import EVERYTHING, NOT_AFFECTED, NOT_IMPORTED, claimed_by, select

REPOSITORY = Path(__file__).resolve().parents[3]
PATH = ("ci", "kernels", "evals", ".")
STEP = {"label": "l", "command": "c", "devices": ("cpu",), "evidence": "junit", "timeout_minutes": 1}


def area(name, *paths, always=False, **steps):
    """An area of one step of its name, or of these steps with their imports."""
    declared = [{"key": key, "imports": imports, **STEP} for key, imports in (steps or {name: ()}).items()]
    return Area.model_validate(
        {"area": name, "title": "T", "why": "W", "paths": paths, "always": always, "steps": declared}
    )


AREAS = (
    area("kernels", "kernels/", "!kernels/audit/", "!*.md"),
    area("audit", "kernels/audit/"),
    area("hygiene", "*.md", "LICENSE", always=True),
)


ALWAYS = {"hygiene": "runs on every change"}
UNCLAIMED = "pyproject.toml changed and no area claims it, so everything runs"


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        (["kernels/layout.py"], {"kernels": "kernels/layout.py changed", **ALWAYS}),
        (["kernels/b.py", "kernels/a.py"], {"kernels": "kernels/a.py and 1 more changed", **ALWAYS}),
        (["README.md", "kernels/README.md"], {"hygiene": "README.md and 1 more changed"}),
        (["pyproject.toml"], dict.fromkeys(("kernels", "audit", "hygiene"), UNCLAIMED)),
        (None, dict.fromkeys(("kernels", "audit", "hygiene"), EVERYTHING)),
        ([], ALWAYS),
    ],
    ids=["one file", "several", "docs alone", "unclaimed", "without base", "nothing changed"],
)
def test_globs_select_and_the_reason_names_the_file(changed, reasons):
    selection = select(AREAS, changed)
    assert selection.reasons == reasons
    assert selection.omitted == dict.fromkeys({"kernels", "audit"} - set(reasons), NOT_AFFECTED)


def test_later_globs_win_as_in_gitignore():
    assert claimed_by(AREAS[0], ["kernels/a.py", "kernels/audit/b.py", "kernels/x/README.md"]) == ["kernels/a.py"]


@pytest.fixture
def repository(tmp_path):
    """Two tests of one area, of which one imports the reader, and a tool that imports it too."""
    for name, text in {
        "kernels/pagedkv/__init__.py": "",
        "kernels/pagedkv/reader.py": "from pagedkv import layout",
        "kernels/pagedkv/layout.py": "",
        "kernels/pagedkv/writer.py": "",
        "kernels/pagedkv/tuning.toml": "",
        "tests/kernels/conftest.py": "",
        "tests/kernels/test_read.py": "import pagedkv.reader",
        "tests/kernels/test_write.py": "import pagedkv.writer",
        "tests/pools.py": "",
        "evals/hileval/__init__.py": "",
        "evals/hileval/gate.py": "import pagedkv.reader",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


IMPORTING = (
    area(
        "kernels",
        "kernels/",
        "tests/",
        read=["tests/kernels/test_read.py"],
        write=["tests/kernels/test_write.py"],
        whole=[],
    ),
    area("evals", "evals/", gate=["hileval"]),
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("kernels/pagedkv/layout.py", {"read", "whole", "gate"}),
        ("kernels/pagedkv/writer.py", {"write", "whole"}),
        ("tests/kernels/test_write.py", {"write", "whole"}),
        ("kernels/pagedkv/__init__.py", {"read", "write", "whole", "gate"}),
        ("kernels/pagedkv/tuning.toml", {"read", "write", "whole"}),
        ("tests/kernels/conftest.py", {"read", "write", "whole"}),
        ("tests/pools.py", {"whole"}),
        ("evals/hileval/gate.py", {"gate"}),
        ("kernels/pagedkv/gone.py", {"read", "write", "whole", "gate"}),
        ("tests/kernels/test_gone.py", {"read", "write", "whole"}),
        ("evals/hileval/gone.py", {"gate"}),
    ],
)
def test_a_module_selects_importers_and_other_files_their_area(repository, changed, expected):
    assert set(select(IMPORTING, [changed], build(repository, PATH)).reasons) == expected


def test_reasons_and_omissions_say_what_imports_what(repository):
    selection = select(IMPORTING, ["kernels/pagedkv/layout.py"], build(repository, PATH))
    assert selection.reasons["read"] == "kernels/pagedkv/layout.py changed, imported by tests/kernels/test_read.py"
    assert selection.reasons["gate"] == "kernels/pagedkv/layout.py changed, imported by hileval"
    assert selection.omitted == {"write": NOT_IMPORTED}
    both = select(IMPORTING, ["kernels/pagedkv/reader.py", "kernels/pagedkv/layout.py"], build(repository, PATH))
    assert both.reasons["gate"] == "kernels/pagedkv/layout.py and 1 more changed, imported by hileval"
    claimed = select(IMPORTING, ["kernels/pagedkv/layout.py", "kernels/pagedkv/tuning.toml"], build(repository, PATH))
    assert claimed.reasons["read"] == "kernels/pagedkv/tuning.toml and 1 more changed"
    own = select(IMPORTING, ["tests/kernels/test_write.py"], build(repository, PATH))
    assert own.reasons["write"] == "tests/kernels/test_write.py changed"
    assert select(IMPORTING, ["kernels/pagedkv/writer.py"], build(repository, PATH)).omitted["gate"] == NOT_AFFECTED
    gone = select(IMPORTING, ["kernels/pagedkv/gone.py"], build(repository, PATH))
    assert gone.reasons["gate"] == "kernels/pagedkv/gone.py is gone"


def test_new_module_selects_the_areas_that_claim_it(repository):
    (repository / "kernels/pagedkv/new.py").write_text("")
    selection = select(
        IMPORTING, ["kernels/pagedkv/new.py"], build(repository, PATH), appeared=["kernels/pagedkv/new.py"]
    )
    assert set(selection.reasons) == {"read", "write", "whole"}
    assert selection.reasons["read"] == "kernels/pagedkv/new.py is new"


def test_without_a_graph_a_module_selects_all_steps_with_imports(repository):
    unknown = Imports(find(repository, PATH), problem="reader.py cannot be parsed")
    selection = select(IMPORTING, ["evals/hileval/gate.py"], unknown)
    assert set(selection.reasons) == {"read", "write", "gate"}
    assert "not known: reader.py cannot be parsed" in selection.reasons["read"]
    assert set(select(IMPORTING, ["kernels/pagedkv/tuning.toml"], unknown).reasons) == {"read", "write", "whole"}


LAYOUT, READER = "kernels/pagedkv/layout.py", "kernels/pagedkv/reader.py"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([LAYOUT], {"read", "gate", "whole"}),
        ([LAYOUT, "kernels/pagedkv/writer.py"], {"read", "gate"}),
        ([LAYOUT, READER], set()),  # of which more than bodies changed
        ([LAYOUT, "evals/hileval/notes.txt"], {"read", "whole"}),
        ([LAYOUT, "kernels/pagedkv/tuning.toml"], {"gate"}),
        ([LAYOUT, "claimed by nobody"], set()),
    ],
)
def test_steps_that_edited_bodies_alone_select_are_named(repository, changed, expected):
    graph = build(repository, PATH)
    assert select(IMPORTING, changed, graph, bodies=[LAYOUT]).by_bodies == expected
    assert select(IMPORTING, changed, graph).by_bodies == set()
    assert select(IMPORTING, changed, None, bodies=changed).by_bodies == set()
    unknown = Imports(find(repository, PATH), problem="no graph")
    assert select(IMPORTING, changed, unknown, bodies=changed).by_bodies == set()
    always = [one.model_copy(update={"always": True}) for one in IMPORTING]
    assert select(always, changed, graph, bodies=[LAYOUT]).by_bodies == set()
    readers = [step.model_copy(update={"reads": (LAYOUT,)}) for one in IMPORTING for step in one.steps]
    reading = [IMPORTING[0].model_copy(update={"steps": tuple(readers)})]
    assert select(reading, [LAYOUT], graph, bodies=[LAYOUT]).by_bodies == set()


DECLARED = load(REPOSITORY).areas
GRAPH = build(REPOSITORY, PATH)
TRACKED = tracked_files(REPOSITORY)
GONE = ("kernels/pagedkv/gone.py", "tests/ci/test_gone.py", "docs/new.md", "new file")
FILES = st.lists(st.sampled_from(TRACKED + GONE), max_size=8)


@settings(max_examples=30, deadline=None)
@given(files=FILES, more=FILES, appeared=st.sets(st.sampled_from(TRACKED)))
def test_one_more_file_never_removes_a_step(files, more, appeared):
    for graph in (GRAPH, None, Imports(find(REPOSITORY, PATH), problem="no graph")):
        before = select(DECLARED, files, graph, appeared)
        after = select(DECLARED, [*files, *more], graph, appeared)
        assert set(before.reasons) <= set(after.reasons)
        assert set(after.reasons).isdisjoint(after.omitted)
        assert all([*after.reasons.values(), *after.omitted.values()])


@settings(max_examples=40, deadline=None)
@given(files=FILES)
def test_a_graph_that_is_not_known_never_selects_less(files):
    known, unknown = (
        select(DECLARED, files, graph) for graph in (GRAPH, Imports(find(REPOSITORY, PATH), problem="no graph"))
    )
    assert set(known.reasons) <= set(unknown.reasons)


def test_repository_claims_what_it_should():
    def selected(*files):
        reasons = select(DECLARED, files, GRAPH).reasons
        return {area.area for area in DECLARED for step in area.steps if step.key in reasons}

    everything = {area.area for area in DECLARED}
    assert selected("pyproject.toml") == everything
    assert selected("ci/agents.yaml") == everything
    assert selected("requirements/laptop.txt") == everything
    assert selected("README.md") == {"hygiene", "examples"}
    assert {"kernels", "codeobjects", "models", "accuracy"} <= selected("kernels/pagedkv/layout.py")
    assert "kernels-cache" not in select(DECLARED, ["kernels/pagedkv/audit/budgets.py"], GRAPH).reasons
    for area_ in everything:
        assert area_ in selected(f"ci/areas/{area_}.yaml")


@pytest.mark.parametrize(
    ("changed", "selected", "omitted"),
    [
        (
            "kernels/pagedkv/cache/gather.py",
            {"kernels-cache", "codeobjects", "codeobjects-triton36"},
            {"kernels-mla", "routing", "models"},
        ),
        ("kernels/pagedkv/tuning/gfx942.toml", {"kernels-cache", "kernels-mla", "models", "routing"}, {"images-units"}),
        ("ci/hilgate/model/record.py", {"units-ci", "units-evals", "accuracy-pocket-hybrid"}, {"kernels-cache"}),
    ],
)
def test_repository_selects_by_what_is_imported(changed, selected, omitted):
    reasons = select(DECLARED, [changed], GRAPH).reasons
    assert selected <= set(reasons)
    assert omitted.isdisjoint(reasons)


ATTENTION = [name for name in tracked_files(REPOSITORY) if re.match(r"kernels/pagedkv/attention/.*\.(py|toml)$", name)]


@given(
    changed=st.lists(st.sampled_from(ATTENTION), min_size=1, max_size=4), others=st.sampled_from([[], ["README.md"]])
)
@settings(max_examples=25, deadline=None)
def test_an_attention_change_is_held_by_a_published_model(changed, others):
    """Whatever else changes: GSM8K on a hub's model, and the same way on a pocket model where the plugin imports it."""
    gates = {"accuracy-granite-4-0-h-micro", "accuracy-pocket-hybrid-paired"}
    reasons = set(select(DECLARED, [*changed, *others], GRAPH).reasons)
    assert "accuracy-granite-4-0-h-micro" in reasons
    assert ("accuracy-pocket-hybrid-paired" in reasons) is ("accuracy-pocket-hybrid" in reasons)
    steps = {step.key: step for area_ in DECLARED for step in area_.steps if step.key in gates}
    assert all("pr" in step.profiles and step.gpus == 1 for step in steps.values())
    assert len(steps) == len(gates)
    assert steps["accuracy-granite-4-0-h-micro"].minutes <= 15
    assert steps["accuracy-granite-4-0-h-micro"].devices == ("gfx942",)


BACKENDS = {step.key for area in DECLARED if area.area == "backends" for step in area.steps}
"""Steps of vLLM's own attention backends; that of ours is models-families."""


@pytest.mark.parametrize(
    ("changed", "ours", "theirs"),
    [
        ("docker/pins.toml", True, True),
        ("requirements/vllm-cpu.txt", True, True),
        ("evals/families/drive.py", True, True),
        ("evals/families/backends.yaml", True, True),
        ("kernels/pagedkv/attention/kernel.py", True, False),
        ("kernels/pagedkv/tuning/gfx942.toml", True, False),
        ("evals/gates.yaml", False, False),
    ],
)
def test_a_pin_selects_every_backend_and_our_kernel_selects_ours(changed, ours, theirs):
    reasons = set(select(DECLARED, [changed], GRAPH).reasons)
    assert ("models-families" in reasons) == ours
    assert reasons & BACKENDS == (BACKENDS if theirs else set())


def test_every_declared_backend_has_a_step_on_its_queues():
    """The axis of evals/families/backends.yaml, planned for a pull request that bumps a pin."""
    document = yaml.safe_load((REPOSITORY / "evals/families/backends.yaml").read_text(encoding="utf-8"))
    steps = {step.command.rpartition(" --backend ")[2]: step for area in DECLARED for step in area.steps}
    for name, backend in document["backends"].items():
        if name != "pagedkv":
            step = steps[name]
            assert "pr" in step.profiles
            assert ("cuda" in step.devices) == ("cuda" in backend["platforms"])
            assert {"gfx942", "gfx950"} <= set(step.devices)
            assert step.matrix.beside == "attention_backend"
    assert {
        step.command.rpartition(" --backend ")[2] for area in DECLARED for step in area.steps if step.key in BACKENDS
    } == {name for name in document["backends"] if name != "pagedkv"}


def test_rank_steps_ask_for_a_gpu_each_and_excuse_none():
    ranks = [step for area in DECLARED for step in area.steps if "MODELS_RANKS" in step.env]
    assert {step.env["MODELS_RANKS"]: step.gpus for step in ranks} == {"2": 2, "4": 4, "8": 8}
    assert not [condition for step in ranks for condition in step.may_lack if condition.startswith("gpus:")]


PAGES = sorted(name for name in tracked_files(REPOSITORY) if name.endswith(".md"))


@pytest.mark.parametrize("name", PAGES)
def test_an_edited_page_selects_at_most_six_steps(name):
    """Those that read it: to select by whole folders would run nearly everything for a word."""
    assert 1 <= len(select(DECLARED, [name], GRAPH).reasons) <= 6


def test_what_a_step_reads_itself_selects_it_alone():
    step = {"key": "one", "label": "one", "command": "true", "devices": ["cpu"], "evidence": "findings"}
    area = {"area": "a", "title": "a", "why": "a", "paths": ["src/", "!*.md"]}
    steps = [step | {"reads": ["docs/*.md"]}, step | {"key": "two"}]
    areas = [DeclaredArea.model_validate(area | {"steps": steps}).resolved()]
    claims = DeclaredArea.model_validate(area | {"area": "b", "paths": ["*.md"], "steps": [step | {"key": "three"}]})
    chosen = select([*areas, claims.resolved()], ["docs/a.md"])
    assert chosen.reasons == {"one": "docs/a.md changed", "three": "docs/a.md changed"}


BUGS = sorted((REPOSITORY / "tests" / "bugs").glob("*/bug.yaml"))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.parent.name)
def test_a_planted_bug_selects_the_step_that_it_turns_red(bug):
    patch = bug.with_name("bug.patch").read_text(encoding="utf-8")
    declared = yaml.safe_load(bug.read_text(encoding="utf-8"))
    # An installed package comes back with a defect when its pin moves.
    pins = {"vllm": ["requirements/vllm-cpu.txt"]}
    files = pins.get(declared.get("package")) or re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE)
    assert declared["turns_red"] in select(DECLARED, files, GRAPH).reasons
