"""Which GPUs and which folder a look is about, what a setting may say, and what people are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.nodes import ToyNode

from hilgate.agent import preflight
from hilgate.errors import DeclarationError
from hilgate.model import Health

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Break = Callable[[ToyNode], object]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "node" / "bin"))
    return tmp_path / "node"


def look(node: ToyNode) -> int:
    return preflight.run(node.env, node.checkout, node=node.node())


def seen(node: ToyNode) -> Health:
    return Health.model_validate_json(node.health("before").read_text())


def used(mib: int, gpu: int = 2) -> Break:
    def change(data: list[dict[str, Any]]) -> None:
        data[gpu]["mem_usage"]["used_vram"]["value"] = mib

    return lambda node: node.edit("metric", change)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 1", "this agent could not be paused: status 1"),
        ("echo 401 Unauthorized >&2; exit 1", "this agent could not be paused: 401 Unauthorized"),
        (None, "this agent could not be paused: buildkite-agent cannot be started"),
    ],
    ids=["fails", "is refused", "is absent"],
)
def test_a_pause_that_fails_is_reported_and_the_status_stays(
    body: str | None, words: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = ToyNode(path, "amd_mi300_8")
    used(41000)(node)
    if body is None:
        (node.bin / "buildkite-agent").unlink()
    else:
        node.program("buildkite-agent", body)
    assert look(node) == 75
    said = capsys.readouterr().out
    assert words in said
    assert "health-before.json could not be uploaded" in said


def test_the_note_is_one_short_printable_line(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.process(4242, "evil\n\x1b[31m`$(reboot)`", opens=("/dev/kfd",))
    used(41000)(node)
    assert look(node) == 75
    note = node.told()[1].removeprefix("pause --note ").removesuffix(" --timeout-in-minutes 240")
    assert note.isprintable()
    assert len(note) <= 300
    assert len(node.told()) == 2


def test_a_cpu_queue_has_no_gpu_phases(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    for name in ("amd-smi", "dmesg", "selfcheck"):
        (node.bin / name).unlink()
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = "amd-cpu"
    assert look(node) == 0
    assert seen(node).gpus == ()


def test_a_step_of_the_pipeline_itself_has_no_folder(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu", "BUILDKITE_ARTIFACT_PATHS": "results/plan.txt"}
    assert look(node) == 0
    assert not (node.checkout / "results").exists()


def test_a_rerun_elsewhere_has_its_own_folder_and_the_same_step(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.env["BUILDKITE_STEP_KEY"] = "kernels-gfx942-recheck"
    node.env["BUILDKITE_ARTIFACT_PATHS"] = "results/jobs/kernels-gfx942.recheck/**/*"
    assert look(node) == 0
    path = node.checkout / "results/jobs/kernels-gfx942.recheck/health-before.json"
    assert Health.model_validate_json(path.read_text()).step == "kernels-gfx942"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"BUILDKITE_AGENT_META_DATA_QUEUE": "default"}, "nothing is known of the queue 'default'"),
        ({"BUILDKITE_AGENT_META_DATA_QUEUE": ""}, "nothing is known of the queue ''"),
        ({"BUILDKITE_AGENT_META_DATA_QUEUE": "amd_mi999_8"}, "nothing is known of the queue 'amd_mi999_8'"),
        ({"HILGATE_EXPECTED_GPUS": "4"}, "the step counts on '4' and the queue amd_mi300_8 has '8'"),
        ({"HILGATE_EXPECTED_ARCH": "gfx950"}, "counts on 'gfx950' and the queue amd_mi300_8 has 'gfx942'"),
        ({"HILGATE_VRAM_LIMIT_MIB": "lots"}, "'lots' is no whole number"),
        ({"HILGATE_MIN_DISK_GIB": "-1"}, "'-1' is no whole number"),
        ({"HILGATE_RENDER_NODES": "renderD999"}, "renderD999 not among the driver's: none"),
        ({"BUILDKITE_ARTIFACT_PATHS": "results/**/*"}, "uploads no results/jobs/<key>"),
        ({"BUILDKITE_ARTIFACT_PATHS": "results/jobs/../../etc/**/*"}, "uploads no results/jobs/<key>"),
    ],
)
def test_a_wrong_setting_is_a_wrong_declaration_and_pauses_nothing(
    change: dict[str, str], words: str, path: Path
) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.env |= change
    with pytest.raises(DeclarationError, match=words):
        look(node)
    assert node.told() == []


def test_a_folder_that_leads_elsewhere_is_refused(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    (node.checkout / "results/jobs").mkdir(parents=True)
    (node.checkout / "results/jobs/kernels-gfx942").symlink_to(node.folder)
    with pytest.raises(DeclarationError, match="is a link"):
        look(node)


def test_a_shared_machine_is_judged_by_the_agents_own_gpu(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.card(2, minor=128, bus=0x05, gpu_id=1)
    node.card(3, minor=136, bus=0x26, gpu_id=2)
    node.env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd_mi300_1", "HILGATE_RENDER_NODES": "renderD136"}
    used(41000, gpu=0)(node)
    node.process(4242, "python3", opens=("/dev/kfd", "/dev/dri/renderD128"))
    node.computes(1)
    assert look(node) == 0
    assert [gpu.bdf for gpu in seen(node).gpus] == ["0000:26:00.0"]
    del node.env["HILGATE_RENDER_NODES"]
    assert look(node) == 75
    assert "8 GPUs where amd_mi300_1 promises 1" in seen(node).problems


def test_a_gpu_of_the_agent_that_amd_smi_does_not_list_is_named(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.card(2, minor=128, bus=0xFF, gpu_id=1)
    node.env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd_mi300_1", "HILGATE_RENDER_NODES": "renderD128"}
    assert look(node) == 75
    assert seen(node).problems[0] == "GPU 0000:ff:00.0 of this agent is not among those that amd-smi lists"


def test_by_hand_it_writes_uploads_and_pauses_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = ToyNode(path, "amd_mi300_8")
    used(41000)(node)
    assert preflight.run(node.env, node.checkout, by_hand=True, node=node.node()) == 75
    assert "unfit: GPU 2" in capsys.readouterr().out
    assert node.told() == []
    assert not (node.checkout / "results").exists()


def test_a_look_by_hand_forgives_the_agent_nothing(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    assert preflight.run(node.env, node.checkout, by_hand=True, node=node.node(remembers=False)) == 0
    assert not (node.folder / "state").exists()
    assert look(node) == 0
    assert (node.folder / "state").exists()


def test_what_a_program_says_cannot_colour_or_move_the_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.program("amd-smi", r"printf '\033[2J+++ fit\a\302\260\n'; exit 1")
    assert look(node) == 75
    said = capsys.readouterr().out
    assert all(line.isprintable() for line in said.splitlines())
    assert r"\x1b[2J" in said
    assert "\N{DEGREE SIGN}" in said
