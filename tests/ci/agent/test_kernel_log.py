# SPDX-License-Identifier: Apache-2.0
"""Which lines of the kernel's log mean GPU trouble, and which of it an agent has already seen."""

from __future__ import annotations

import pytest
from support.nodes import QUIET, FakeNode

from agent_host import host, kernel_log
from agent_host.kernel_log import Position, Severity
from hilgate.judge.health import lines, trouble

LINES = {
    "amdgpu 0000:05:00.0: socket: 0, die: 1, 2 uncorrectable hardware errors detected in umc block": Severity.BROKEN,
    "amdgpu 0000:05:00.0: {3} socket: 0, die: 0, 1 new uncorrectable hardware errors detected in gfx": Severity.BROKEN,
    "amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!": Severity.BROKEN,
    "amdgpu 0000:1c:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!": Severity.BROKEN,
    "amdgpu 0000:05:00.0: socket: 0, die: 1, 1 uncorrectable hardware error detected in umc block": Severity.BROKEN,
    "amdgpu: RAS records:300 exceed threshold:256, GPU will not be initialized.": Severity.BROKEN,
    "amdgpu 0000:05:00.0: amdgpu: GPU reset(4) failed": Severity.BROKEN,
    "amdgpu: GPU Recovery Failed: -19": Severity.BROKEN,
    "amdgpu 0000:05:00.0: amdgpu: GPU reset end with ret = -19": Severity.BROKEN,
    "amdgpu 0000:05:00.0: amdgpu: device lost from bus!": Severity.BROKEN,
    "amdgpu 0000:05:00.0: amdgpu: XGMI PCS DataLossErr detected": Severity.BROKEN,
    "amdgpu 0000:05:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer": Severity.BROKEN,
    "amdgpu 0000:05:00.0: amdgpu: ring comp_1.2.0 timeout, signaled seq=41, emitted seq=44": Severity.HUNG,
    "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, but soft recovered": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!. Source:  3": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: MES(0) failed to respond to msg=REMOVE_QUEUE": Severity.HUNG,
    "[drm:mes_v11_0_submit_pkt_and_poll_completion [amdgpu]] *ERROR* MES failed to response msg=3": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: MES might be in unrecoverable state, issue a GPU reset": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: SMU: I'm not done with your previous command: SMN_C2PMSG_66:0x06": Severity.HUNG,
    "[drm:amdgpu_ring_test_helper [amdgpu]] *ERROR* ring kiq_0.2.1.0 test failed (-110)": Severity.HUNG,
    "amdgpu 0000:05:00.0: [drm:amdgpu_ring_test_helper [amdgpu]] *ERROR* ring kiq_2.1.0 test failed": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: failed to remove hardware queue from MES, doorbell=0x1a02": Severity.HUNG,
    "amdgpu: failed to add hardware queue to MES, doorbell=0x1a02": Severity.HUNG,
    "[drm:amdgpu_dm_init [amdgpu]] *ERROR* amdgpu: failed to initialize freesync_module": Severity.UNKNOWN,
    "amdgpu 0000:05:00.0: [drm] *ERROR* dc_dmub_srv_log_diagnostic_data: DMCUB error": Severity.UNKNOWN,
    "amdgpu 0000:05:00.0: amdgpu: *ERROR* something of the next release": Severity.UNKNOWN,
    "amdgpu 0000:05:00.0: {2}[Hardware Error]: Accelerator Check Architecture events logged": Severity.UNKNOWN,
    "amdgpu 0000:05:00.0: amdgpu: [Hardware Error]: ACA[01/01].STATUS=0xd820000000030000": Severity.UNKNOWN,
    "mce: [Hardware Error]: Machine check events logged": None,
    "*ERROR*[2581]: segfault at 0 ip 00007f sp 00007f error 4 in python3.11[41f000+2a1000]": None,
    "amdgpu: [2581]: *ERROR* segfault at 0 ip 00007f sp 00007f error 4": None,
    "amdgpu: qcm fence wait loop timeout expired": Severity.HUNG,
    "amdgpu: The cp might be in an unrecoverable state due to an unsuccessful queues preemption": Severity.HUNG,
    "amdgpu: Failed to evict process queues": Severity.HUNG,
    "amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:3 pasid:32771)": Severity.FAULT,
    "amdgpu 0000:05:00.0: amdgpu: VM_L2_PROTECTION_FAULT_STATUS:0x00301031": Severity.FAULT,
    "amdgpu 0000:05:00.0: amdgpu: GCVM_L2_PROTECTION_FAULT_STATUS:0x00A01A30": Severity.FAULT,
    "amdgpu 0000:05:00.0: amdgpu: no uncorrectable hardware errors detected in umc block": None,
    "amdgpu 0000:05:00.0: {3} socket: 0, die: 0, 0 uncorrectable hardware errors detected in total in umc block": None,
    "amdgpu 0000:05:00.0: amdgpu: 12 correctable hardware errors detected in umc block": None,
    "amdgpu 0000:05:00.0: amdgpu: ring comp_1.0.0 uses VM inv eng 0 on hub 0": None,
    "amdgpu 0000:05:00.0: amdgpu: GPU reset(4) succeeded!": None,
    "amdgpu 0000:05:00.0: amdgpu: XGMI: Add node 3, hive 0x1234, 8 nodes": None,
    "pcieport 0000:00:01.1: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer": None,
    "kfd kfd: amdgpu: HWS hang": Severity.HUNG,
    "amdgpu 0000:05:00.0: [drm] *ERROR* ring comp_1.2.0 timeout, signaled seq=41, emitted seq=44": Severity.HUNG,
    "python3[4242]: segfault at 0 ip 00007f error 4 in libtorch_hip.so": None,
    "usb 1-1: reset high-speed USB device number 2": None,
}


@pytest.mark.parametrize(("line", "severity"), LINES.items())
def test_trouble_has_its_severity_and_other_lines_none(line: str, severity: Severity | None) -> None:
    assert kernel_log.severity_of(line) is severity


def log(*lines: tuple[float, str]) -> kernel_log.Log:
    found = kernel_log.parse(QUIET + "".join(f"[{stamp:12.6f}] {text}\n" for stamp, text in lines))
    assert found is not None
    return found


HANG = "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!"
FAULT = "amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0)"
BAD_MEMORY = "amdgpu 0000:26:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block"


def test_a_hang_counts_once_and_bad_memory_until_the_next_boot() -> None:
    found = log((200.0, HANG), (201.0, BAD_MEMORY), (300.0, FAULT))
    assert [line.text for line in found.since(-1.0, -1.0)] == [HANG, BAD_MEMORY, FAULT]
    assert [line.text for line in found.since(250.0, -1.0)] == [BAD_MEMORY, FAULT]
    assert [line.text for line in found.since(found.end, -1.0)] == [BAD_MEMORY]
    assert found.since(found.end, 250.0) == []
    assert found.end == 300.0


def test_a_line_about_another_agents_gpu_is_not_ours() -> None:
    nameless = "amdgpu: qcm fence wait loop timeout expired"
    found = log((200.0, HANG), (201.0, BAD_MEMORY), (202.0, nameless))
    mine = found.since(-1.0, -1.0, frozenset({"0000:26:00.0"}))
    assert [line.text for line in mine] == [BAD_MEMORY, nameless]
    assert found.since(-1.0, -1.0) == list(found.trouble)


def test_a_line_not_understood_counts_nothing_and_is_listed(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "amdgpu 0000:05:00.0: amdgpu: *ERROR* something of the next release"
    node.log(QUIET + f"[  201.000000] {line}\n")
    assert node.preflight() == 0
    record = node.record("before")
    assert (record.problems, record.dmesg) == ((), ())
    assert record.notes == (f"the kernel's log, not understood: [201.000000] {line}",)
    assert trouble([record], "", 8) == ()
    assert [one for one in lines([record]) if line in one] == [f"seen before, not judged: {record.notes[0]}"]
    monkeypatch.setattr(host, "PROC", node.proc)
    assert kernel_log.main([]) == 0
    assert capsys.readouterr().out.endswith(f"unknown [201.000000] {line}\n")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("dmesg-is-not-there", "cannot be started"),
        ("sh -c 'echo dmesg: Operation not permitted >&2; exit 1'", "Operation not permitted"),
        ("true", "empty or has no times"),
        ("printf 'no times here\\nnor here\\n'", "empty or has no times"),
        ("sh -c 'open", "is no command"),
    ],
)
def test_a_log_that_cannot_be_read_is_named(setting: str, words: str) -> None:
    with pytest.raises(host.SickNodeError, match=words):
        kernel_log.read({"HILGATE_KERNEL_LOG": setting})


def position(node: FakeNode) -> Position:
    return Position(node.env, node.proc / kernel_log.BOOT_ID)


def test_what_was_seen_is_forgotten_at_the_next_boot(node: FakeNode) -> None:
    assert position(node).load() == (-1.0, -1.0)
    position(node).save(42.5)
    assert position(node).load() == (42.5, -1.0)
    position(node).save(43.5, accepted=True)
    position(node).save(44.5)
    assert position(node).load() == (44.5, 43.5)
    (node.proc / "sys/kernel/random/boot_id").write_text("another\n")
    assert position(node).load() == (-1.0, -1.0)
    position(node).save(45.5)
    node.env["BUILDKITE_AGENT_NAME"] = "mi300-node7-2"
    assert position(node).load() == (-1.0, -1.0), "each agent of a machine has its own note"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"boot": 1}', "null"])
def test_a_damaged_note_of_what_was_seen_counts_for_nothing(damage: str, node: FakeNode) -> None:
    position(node).save(42.5)
    position(node).path.write_text(damage)
    assert position(node).load() == (-1.0, -1.0)


def test_a_folder_that_cannot_be_written_changes_nothing(node: FakeNode) -> None:
    (node.folder / "state").write_text("a file where a folder should be")
    position(node).save(42.5)
    assert position(node).load() == (-1.0, -1.0)


def test_a_person_can_see_and_accept_it(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.log(QUIET + f"[  201.000000] {BAD_MEMORY}\n")
    monkeypatch.setenv("HILGATE_STATE", node.env["HILGATE_STATE"])
    monkeypatch.setattr(host, "PROC", node.proc)
    assert kernel_log.main([]) == 75
    assert capsys.readouterr().out == f"broken  [201.000000] {BAD_MEMORY}\n"
    assert kernel_log.main(["--accept"]) == 0
    capsys.readouterr()
    assert kernel_log.main([]) == 0
    assert capsys.readouterr().out == ""
