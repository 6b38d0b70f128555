# SPDX-License-Identifier: Apache-2.0
"""Declarations: what is accepted, and that each mistake is named with its file, line and remedy."""

import itertools
import json
import textwrap
from pathlib import Path

import pytest

from agent_host import health
from hilgate.declare.load import InvalidDeclarationsError, find_root, load
from hilgate.errors import Exit, MisuseError

REPOSITORY = Path(__file__).resolve().parents[3]

AGENTS = """\
devices:
  cpu: {}
  gfx942: {}
queues:
  amd-cpu: {device: cpu, gpus: 0, memory_gib: 64}
  amd_mi325_1: {device: gfx942, gpus: 1, memory_gib: 256}
  amd_mi300_1: {device: gfx942, gpus: 1, memory_gib: 192}
  amd_mi300_8: {device: gfx942, gpus: 8, memory_gib: 192}
"""

STEP = "{key: one, label: l, command: python -m x, devices: [cpu], evidence: junit}"


def area(name: str, *steps: str) -> str:
    listed = "".join(f"  - {step}\n" for step in steps or (STEP,))
    return f"area: {name}\ntitle: T\nwhy: W.\npaths: [src/]\nsteps:\n{listed}"


def write(root: Path, agents: str = AGENTS, **areas: str) -> Path:
    (root / "ci" / "areas").mkdir(parents=True)
    (root / "ci" / "agents.yaml").write_text(agents)
    for name, text in areas.items():
        (root / "ci" / "areas" / f"{name}.yaml").write_text(textwrap.dedent(text))
    return root


def mistakes(root: Path) -> list[str]:
    with pytest.raises(InvalidDeclarationsError) as caught:
        load(root)
    assert caught.value.exit_status == Exit.INVALID_DECLARATION
    return [str(mistake) for mistake in caught.value.mistakes]


def test_repository_declares_every_queue_of_the_fleet():
    queues = load(REPOSITORY).agents.queues
    fleet = {f"amd_mi{product}_{count}" for product in (250, 300, 325, 355) for count in (1, 2, 4, 8)}
    assert set(queues) == fleet | {"amd-cpu", "amd-gate", "amd-image", "amd-release"}
    assert all(queue.device == "cpu" or queue.gpus == int(name[-1]) for name, queue in queues.items())


def test_gate_at_a_desk_stays_under_thirty_cpu_minutes():
    at_a_desk = [step for _, step in load(REPOSITORY).steps() if "cpu" in step.devices and "gate" in step.profiles]
    assert sum(step.minutes for step in at_a_desk) < 30


def test_the_quick_steps_take_three_minutes_on_two_cores():
    declared = load(REPOSITORY)
    quick = [declared.step(key)[1] for key in declared.project.quick]
    needed = {need for step in quick for need in step.needs}
    assert needed <= set(declared.project.quick)
    assert sum(step.minutes for step in quick) <= 3 * 2


def test_a_queue_is_the_smallest_with_the_gpus_unless_named(tmp_path):
    named = STEP.replace("one,", "two,").replace("[cpu]", "[gfx942], agents: {queues: {gfx942: amd_mi300_8}}")
    four = STEP.replace("one,", "four, agents: {gpus: 4},").replace("[cpu]", "[cpu, gfx942]")
    declarations = load(write(tmp_path, a=area("a", STEP.replace("[cpu]", "[cpu, gfx942]"), named, four)))
    queues = [[declarations.queue_for(step, device) for device in step.devices] for _, step in declarations.steps()]
    assert queues == [["amd-cpu", "amd_mi300_1"], ["amd_mi300_8"], ["amd-cpu", "amd_mi300_8"]]
    assert declarations.queue_for(declarations.areas[0].steps[0], "gfx950") is None


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            STEP.replace("evidence", "minuts: 5, evidence"),
            "unknown key 'minuts'; did you mean 'minutes'",
        ),
        (STEP.replace("[cpu]", "[gfx924]"), "steps[0].devices[0]: unknown device 'gfx924'; did you mean 'gfx942'"),
        (STEP.replace("[cpu]", "[cpu, cpu]"), "device 'cpu' is listed twice"),
        (STEP.replace("[cpu]", "[]"), "steps[0].devices: tuple must have at least 1 item"),
        (STEP.replace("[cpu]", "[gfx942], agents: {queues: {gfx942: amd_mi30_1}}"), "unknown queue 'amd_mi30_1'"),
        (STEP.replace("[cpu]", "[gfx942], agents: {queues: {gfx942: amd-cpu}}"), "'amd-cpu' offers cpu, not gfx942"),
        (STEP.replace("[cpu]", "[cpu], agents: {queues: {gfx942: amd_mi300_1}}"), "is not a device of step 'one'"),
        (
            STEP.replace("[cpu]", "[gfx942], agents: {gpus: 4, queues: {gfx942: amd_mi300_1}}"),
            "queue 'amd_mi300_1' has 1 GPUs and the step needs 4; name a larger queue",
        ),
        (
            STEP.replace("label: l", "label: l, needs: [ones]"),
            "steps[0].needs[0]: unknown step 'ones'; did you mean 'one'",
        ),
        (
            STEP.replace("label: l", "env: {TRITON_INTERPRET: 0}, label: l"),
            "env.TRITON_INTERPRET: must be a valid string, got 0",
        ),
        (STEP.replace("label: l", "label: 2026-01-01"), "'2026-01-01' is read as a date; quote it"),
        (STEP.replace("label: l", "label: l, key: two"), "key 'key' is already on line 6; keep one of them"),
        (STEP.replace("label: l", "label: l, minutes: 181"), "must be less than or equal to 180, got 181"),
        (STEP.replace("command: python -m x, ", ""), "step 'one' runs nothing; write `tests: [tests/kernels]`"),
        (STEP.replace("command: python -m x", "tests: ['!tests/a']"), "leaves out tests and names none"),
        (STEP.replace("command: python -m x", "tests: [src]"), "tests[0]: there is no 'src'"),
        (STEP.replace("command: python -m x", "tests: [ci]"), "tests[0]: 'ci' holds no test (test_*.py)"),
        (STEP.replace("command: python -m x", "tests: ['../x']"), "'../x' is no plain path below the root"),
        (STEP.replace("command: python -m x", "tests: ['!a.py::b']"), "leaves out a single test"),
        (STEP.replace(", evidence: junit", ""), "step 'one' has a command and no evidence"),
        (
            STEP.replace("[cpu]", "[cpu], agents: {shard_minutes: 5}"),
            "has shard_minutes, and only a run of `python -m pytest` without -n can be split",
        ),
        (STEP.replace("evidence", "requires: ['gpu:4'], evidence"), "'gpu:4' is nothing that a machine"),
        (STEP.replace("python -m x", "python x | tee log"), "'|' needs a shell and there is none"),
        (STEP.replace("python -m x", "'python \"x'"), "cannot be split into words"),
        (STEP.replace("key: one", "key: One"), "steps[0].key: string must match pattern"),
        (STEP.replace("key: one", "key: triton-3.6"), "'triton-3.6' is no Buildkite step key"),
        (STEP.replace("key: one, ", ""), "key 'key' is missing"),
        (STEP.replace("key: one", "key: verdict"), "'verdict' is a step of the pipeline itself"),
    ],
)
def test_mistake_in_a_step_is_named_with_line_and_remedy(tmp_path, step, expected):
    (found,) = mistakes(write(tmp_path, a=area("a", step)))
    assert found.startswith("ci/areas/a.yaml:6 ")
    assert expected in found


TABLE = {"rows": "arch", "columns": "dtype", "file": "cells.json"}


def with_table(**changes: str | None) -> str:
    spec = {name: value for name, value in (TABLE | changes).items() if value is not None}
    return STEP.replace("evidence: junit", f"evidence: {{kind: junit, matrix: {json.dumps(spec)}}}")


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (with_table(columns=None), "matrix: key 'columns' is missing; add columns (The label that names the column"),
        (with_table(rows=""), "matrix.rows: must be a word of lower case letters, digits and '_'"),
        (with_table(columns="-b"), "matrix.columns: must be a word of lower case letters"),
        (with_table(columns="arch"), "matrix.columns: 'arch' names the rows already; name another label"),
        (with_table(file="../m.json"), "matrix.file: must be a plain file name, lower case, that ends in .json"),
        (with_table(file="m.txt"), "matrix.file: must be a plain file name, lower case, that ends in .json"),
        (with_table(file="plan.json"), "matrix.file: 'plan.json' is a file of every build; choose another name"),
        (with_table(row="x"), "unknown key 'row'; did you mean 'rows'"),
    ],
)
def test_mistake_in_a_table_is_named_with_its_remedy(tmp_path, step, expected):
    (found,) = mistakes(write(tmp_path, a=area("a", step)))
    assert found.startswith("ci/areas/a.yaml:6 steps[0]")
    assert expected in found


def test_file_of_a_table_belongs_to_one_step(tmp_path):
    (found,) = mistakes(write(tmp_path, a=area("a", with_table(), with_table().replace("key: one", "key: two"))))
    assert "steps[1].evidence.matrix.file: 'cells.json' is taken by ci/areas/a.yaml:6 steps[0].evidence.matrix" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "ci/areas/a.yaml:1: is empty"),
        ("area: [", "ci/areas/a.yaml:1: is not YAML"),
        ("area: a\n---\narea: b\n", "is not YAML: but found another document"),
        ("- a\n", "must be an object"),
        ("x: &x [*x]\n", "x[0]: is an alias of what contains it"),
        (area("b"), "area 'b' is declared in a.yaml; name the file b.yaml"),
        (area("a").replace("[src/]", "['!']"), "paths[0]: not a glob"),
        (area("a") + "on: true\n", "key True is not text; quote it"),
    ],
)
def test_mistake_in_a_file(tmp_path, text, expected):
    assert any(expected in found for found in mistakes(write(tmp_path, a=text)))


def test_all_mistakes_are_reported_at_once(tmp_path):
    agents = AGENTS.replace("gpus: 8", "gpus: 0").replace(
        "device: gfx942, gpus: 1, memory_gib: 256", "device: gfx9, gpus: 1, memory_gib: 256"
    )
    root = write(
        tmp_path, agents, a=area("a", STEP.replace("[cpu]", "[gpu]")), b=area("b", STEP.replace("label", "lable"))
    )
    found = mistakes(root)
    assert [one.split(":")[0] for one in found] == ["ci/agents.yaml"] * 2 + ["ci/areas/a.yaml"] + ["ci/areas/b.yaml"]
    with pytest.raises(InvalidDeclarationsError, match="4 mistakes in the declarations"):
        load(root)


def test_key_taken_in_another_file_names_the_place(tmp_path):
    (found,) = mistakes(write(tmp_path, a=area("a"), b=area("b")))
    assert (
        found == "ci/areas/b.yaml:6 steps[0].key: 'one' is taken by ci/areas/a.yaml:6 steps[0].key; choose another key"
    )


def test_cycle_is_named(tmp_path):
    def step(key: str, need: str) -> str:
        return STEP.replace("key: one", f"key: {key}, needs: [{need}]")

    (found,) = mistakes(write(tmp_path, a=area("a", step("x", "y"), step("y", "z"), step("z", "x"))))
    cycle = found.split("steps need each other: ")[1].split(";")[0].split(" -> ")
    assert len(cycle) == 4
    assert cycle[0] == cycle[-1]
    assert all((a, b) in {("x", "y"), ("y", "z"), ("z", "x")} for a, b in itertools.pairwise(cycle))


DEPENDANT = STEP.replace("key: one", "key: two, needs: [one]")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([STEP.replace("[cpu]", "[gfx942]"), DEPENDANT], "step 'one' does not run on cpu"),
        (
            [STEP.replace("label: l", "label: l, profiles: [nightly, release]"), DEPENDANT],
            "step 'one' is not in the plans gate, pr; add to the profiles of 'one'",
        ),
        (
            [STEP.replace("label: l", "label: l, report_only: true"), DEPENDANT],
            "step 'one' is report_only, and this step, which counts, cannot start without it",
        ),
        (
            [STEP, STEP.replace("key: one", "key: one-cpu").replace("[cpu]", "[gfx942]")],
            "'one-cpu' is taken by ci/areas/a.yaml:6 steps[0].key",
        ),
    ],
    ids=["no shared device", "not in the same plans", "need that no verdict counts", "planned keys collide"],
)
def test_steps_that_do_not_fit_each_other(tmp_path, steps, expected):
    (found,) = mistakes(write(tmp_path, a=area("a", *steps)))
    assert expected in found


COUNTED = STEP.replace("label: l", "label: l, minimum: 9")


def test_a_step_of_pytest_declares_no_minimum(tmp_path):
    (found,) = mistakes(write(tmp_path, a=area("a", COUNTED)))
    where, what = "ci/areas/a.yaml:6 steps[0].minimum", "a step whose evidence is junit has no minimum"
    assert found == f"{where}: {what}; remove it: every test that pytest collects must end"


def test_a_step_that_writes_findings_declares_their_minimum(tmp_path):
    root = write(tmp_path, a=area("a", COUNTED.replace("junit", "findings")))
    assert load(root).step("one")[1].minimum == 9


BUILDS = STEP.replace("key: one", "key: image-rocm, agents: {provides: rocm}")
ON_GPU = STEP.replace("key: one", "key: two").replace("[cpu]", "[gfx942]")
WITH_IMAGE = AGENTS.replace("gpus: 1, memory_gib: 192", "gpus: 1, memory_gib: 192, image: rocm")


def test_image_that_a_step_provides_is_good(tmp_path):
    declarations = load(write(tmp_path, WITH_IMAGE, a=area("a", BUILDS, ON_GPU)))
    (_, builds), (_, on_gpu) = declarations.steps()
    assert declarations.provider("rocm") == builds
    assert declarations.image_for(on_gpu, "gfx942") == "rocm"
    assert declarations.image_for(builds, "cpu") is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([ON_GPU], "ci/agents.yaml:7 queues.amd_mi300_1.image: no step provides", id="nobody builds it"),
        pytest.param(
            [BUILDS.replace("provides: rocm", "provides: rcom"), ON_GPU], "did you mean 'rcom'", id="misspelt image"
        ),
        pytest.param(
            [BUILDS, BUILDS.replace("image-rocm", "again"), ON_GPU], "is built by step 'image-rocm' already", id="twice"
        ),
        pytest.param([BUILDS.replace("[cpu]", "[gfx942]"), ON_GPU], "runs on the cpu alone", id="built on a GPU"),
        pytest.param(
            [BUILDS.replace("label: l", "label: l, needs: [two]"), ON_GPU.replace("[gfx942]", "[cpu, gfx942]")],
            "steps need each other: ",
            id="built after what runs in it",
        ),
        pytest.param(
            [BUILDS.replace("label: l", "label: l, profiles: [nightly]"), ON_GPU],
            "'image-rocm' does not build in the plans pr, release",
            id="not built in its plans",
        ),
    ],
)
def test_image_that_cannot_be_had(tmp_path, steps, expected):
    assert any(expected in found for found in mistakes(write(tmp_path, WITH_IMAGE, a=area("a", *steps))))


@pytest.mark.parametrize(
    ("imports", "command", "expected"),
    [
        ("[pagedkv.layuot]", "x", "imports[0]: there is no module or test file 'pagedkv.layuot'; did you mean"),
        ("[tests/test_non.py]", "x", "'tests/test_non.py'; did you mean 'tests/test_one.py'?"),
        ("[torch]", "x", "there is no module or test file 'torch'"),
        ("[pagedkv]", "python -m pytest tests/test_one.py", "runs 'tests/test_one.py', which is not among them"),
        ("[tests/test_one.py]", "python -m pagedkv.layout", "runs 'pagedkv.layout', which is not among them"),
    ],
)
def test_import_that_is_not_there_and_one_that_is_missing(tmp_path, imports, command, expected):
    for name in ("kernels/pagedkv/__init__.py", "kernels/pagedkv/layout.py", "tests/test_one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    step = STEP.replace("label: l", f"label: l, imports: {imports}").replace("python -m x", command)
    root = write(tmp_path, a=area("a", step))
    (root / "ci" / "project.yaml").write_text("python_path: [kernels, .]\n")
    (found,) = mistakes(root)
    assert found.startswith("ci/areas/a.yaml:6 ")
    assert expected in found


@pytest.mark.parametrize(
    ("quick", "expected"),
    [
        ("[oen]", "[0]: unknown step 'oen'; did you mean 'one'?"),
        ("[one-cpu]", "[0]: unknown step 'one-cpu'"),
        ("[two, one, two]", "[2]: step 'two' is listed twice; keep one"),
        (
            "[night]",
            "[0]: step 'night' is in no plan for a person's machine; add gate to its profiles, or name another",
        ),
        ("one", ": must be a valid array, got 'one'"),
    ],
)
def test_quick_steps_that_no_gate_can_run_are_refused(tmp_path, quick, expected):
    night = STEP.replace("key: one", "key: night, profiles: [nightly]")
    root = write(tmp_path, a=area("a", STEP, STEP.replace("key: one", "key: two"), night))
    (root / "ci" / "project.yaml").write_text(f"# of a project\nquick: {quick}\n")
    (found,) = mistakes(root)
    assert found.startswith(f"ci/project.yaml:2 quick{expected}")


def test_a_mistake_in_an_area_is_not_one_of_the_quick_steps(tmp_path):
    """What a file with mistakes of its own declares is not known."""
    root = write(tmp_path, a=area("a", STEP.replace("junit", "3")))
    (root / "ci" / "project.yaml").write_text("quick: [one]\n")
    (found,) = mistakes(root)
    assert found.startswith("ci/areas/a.yaml:6 steps[0].evidence")


def test_root_is_found_from_below(tmp_path):
    root = write(tmp_path / "repository", a=area("a"))
    assert find_root(root / "ci" / "areas") == root.resolve()
    with pytest.raises(MisuseError, match="not inside a repository"):
        find_root(tmp_path)


def test_a_new_products_queue_is_known_to_hosts_by_declaration(tmp_path):
    line = "  amd_mi350_4: {device: gfx950, gpus: 4, memory_gib: 288, image: rocm}\n"
    text = (REPOSITORY / "ci/agents.yaml").read_text() + line
    write(tmp_path, text, a=area("a", STEP.replace("evidence", "agents: {provides: rocm}, evidence")), b=IMAGE_CPU)
    assert load(tmp_path).queue_for(load(tmp_path).areas[0].steps[0], "cpu") == "amd-cpu"
    promise = health.promised({health.QUEUE: "amd_mi350_4", "HILGATE_REPOSITORY": str(tmp_path)})
    assert (promise.gpus, promise.arch, promise.memory_gib) == (4, "gfx950", 288)


IMAGE_CPU = area("b", STEP.replace("evidence", "agents: {provides: cpu}, evidence").replace("one", "two"))


@pytest.mark.parametrize(
    ("project", "expected"),
    [
        ("forks_may_change: [src/, ci/]", "hosts execute 'ci/'"),
        ("forks_may_change: [.buildkite/]", "no plain path below the root"),
        ("forks_may_change: [.]", "hosts execute '.'"),
        ("forks_may_change: [json/]", "take it for a module of Python itself"),
        ("forks_may_change: [argparse.py]", "take it for a module of Python itself"),
        ("forks_may_change: [../src/]", "no plain path below the root"),
        ("forks_may_change: &list [src/]\npython_path: *list", "agents' hosts refuse the alias *list"),
        ("python_path: [a b]", "no plain path below the root"),
        ("images: {x: {recipe: docker/x.Dockerfile, pins: true}}", "has no table for an image 'x'"),
        ("statsu: x", "did you mean 'status'?"),
    ],
)
def test_a_project_that_lets_forks_onto_hosts_is_refused(tmp_path, project, expected):
    root = write(tmp_path, a=area("a"))
    (root / "ci/project.yaml").write_text(project + "\n")
    found = mistakes(root)
    assert any(expected in one and one.startswith("ci/project.yaml:") for one in found), found


def test_an_alias_that_hosts_refuse_is_refused_in_a_plan(tmp_path):
    queues = "amd-cpu: &cpu {device: cpu, gpus: 0, memory_gib: 64}\n  other: *cpu"
    (found,) = mistakes(write(tmp_path, f"devices: {{cpu: {{}}}}\nqueues:\n  {queues}\n", a=area("a")))
    assert found.startswith("ci/agents.yaml:4: agents' hosts refuse the alias *cpu")


POD_QUEUE = (
    "{device: gfx942, gpus: 1, memory_gib: 192, image: rocm, pods: {registry: r.example/x, cpus: 8, memory_gib: 64}}"
)
PARTITION = "{device: gfx942-cpx, gpus: 1, memory_gib: 24, compute_units: 38}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "cpus: 8",
            "cpus: 8, resource: nvidia.com/gpu",
            "pods.resource: unknown resource 'nvidia.com/gpu'; write amd.com/gpu",
        ),
        ("cpus: 8", "cpus: 8, resource: amd.com/cpx_nps3", "unknown resource 'amd.com/cpx_nps3'"),
        (
            "cpus: 8",
            "cpus: 8, resource: amd.com/cpx_nps4",
            "pods.resource: amd.com/cpx_nps4 is no gfx942; name the resource",
        ),
        ("r.example/x", "r.example/x:latest", "pods.registry: 'r.example/x:latest' is no repository"),
        (
            "r.example/x",
            "'r.example/x@sha256:00'",
            "is no repository; write e.g. registry.internal/hilgate, without a tag",
        ),
        ("cpus: 8", "cpus: 8, node_selector: {a: b c}", "pods.node_selector: 'b c' is no label of a node"),
        ("cpus: 8", "cpus: 8, service_account: admin", "unknown key 'service_account'"),
        ("cpus: 8, ", "", "queues.pods_1.pods"),
        ("image: rocm, ", "", "pods: a pod runs in an image, and the queue has none; name its image"),
        ("image: rocm", "image: rocm, gate: true", "queues.pods_1.gate: is of hosts, and this queue's jobs are pods"),
        (
            "image: rocm",
            "image: rocm, tools: [docker]",
            "queues.pods_1.tools: is of hosts, and this queue's jobs are pods",
        ),
    ],
)
def test_each_mistake_of_a_queue_of_pods_is_one_line(tmp_path, old, new, expected):
    agents = AGENTS + f"  pods_1: {POD_QUEUE.replace(old, new)}\n"
    found = mistakes(write(tmp_path, agents, a=area("a")))
    assert any(expected in one for one in found)
    assert all("\n" not in one for one in found)


def test_a_partition_is_a_device_of_queues_and_steps(tmp_path):
    agents = AGENTS.replace("gfx942: {}", "gfx942: {}\n  gfx942-cpx: {}") + f"  cpx_1: {PARTITION}\n"
    declared = load(write(tmp_path, agents, a=area("a", STEP.replace("[cpu]", "[gfx942, gfx942-cpx]"))))
    (_, step) = next(iter(declared.steps()))
    assert [declared.queue_for(step, device) for device in step.devices] == ["amd_mi300_1", "cpx_1"]
    promise = health.clone.queues(agents)["cpx_1"]
    assert (promise.arch, promise.memory_gib, promise.compute_units) == ("gfx942", 24, 38)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("gfx942-cpx", "gfx942-cpz", "devices.gfx942-cpz: 'gfx942-cpz' is no partition of a GPU; write gfx942-cpx"),
        (", compute_units: 38", "", "nothing tells a partition from a whole GPU; write its compute_units"),
    ],
)
def test_each_mistake_of_a_partition_is_one_line(tmp_path, old, new, expected):
    agents = AGENTS.replace("gfx942: {}", "gfx942: {}\n  gfx942-cpx: {}") + f"  cpx_1: {PARTITION}\n"
    assert any(expected in one for one in mistakes(write(tmp_path, agents.replace(old, new), a=area("a"))))
