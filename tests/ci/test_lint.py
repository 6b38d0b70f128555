# SPDX-License-Identifier: Apache-2.0
"""The house rules and the linter runner: each planted mistake is found, and a missing tool did not run."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml
from support.planted import instead, must_be_noticed, planted

from ci import lint as linting
from ci.lint import RULES, Linter, lint
from hilgate.cli.app import program
from hilgate.errors import Exit
from hilgate.model.record import Check, Outcome

ROOT = Path(__file__).parents[2]
HOME = "/".join(("", "home", "someone", "project"))  # spelt so that this file keeps the rule it tests
INDEX = "https://" + "pypi.example.org/simple"


class Unknown(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of Python."""


Unknown.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)

LATE = f'"""A module."""\n{linting.LICENSE}\n'
FAULTS = {
    "a license that is late": (LATE, "ci/hilgate/b.py", "licenses"),
    "a script without a license": ("#!/usr/bin/env bash\nset -e\n", "docker/scripts/b.sh", "licenses"),
    "another license": (f"#!/usr/bin/env bash\n{linting.LICENSE} AND MIT\n", ".ci/run", "licenses"),
    "a flow of one wait": ("steps: [wait]\n", "pipeline.yml", "pipelines"),
    "a local hook": ("", ".buildkite/hooks/pre-exit", "no-local-hooks"),
    "a folder that is a package": ("", "kernels/__init__.py", "no-folder-package"),
    "a folder of tests that is a package": ("", "tests/ci/__init__.py", "no-folder-package"),
    "a path of a machine": (f"see `{HOME}/notes`", "docs.md", "no-machine-path"),
    "a package index": (f"pip install -i {INDEX} x", "Makefile", "no-package-index"),
    "one package index more": ("pip install --extra-index" + "-url http://x/ y", "Makefile", "no-package-index"),
    "a link to what git does not have": ("[the command line](reference/cli.md)", "docs/index.md", "links"),
    "a wide line in a block": (f"```text\n{'x' * 89}\n```\n", "docs/index.md", "wide-blocks"),
    "a wide indented line": (f"    {'x' * 89}\n", "docs/index.md", "wide-blocks"),
}
"""What a file says, the file, and the rule that names it."""


@planted(FAULTS)
def test_planted_mistake_is_found_by_its_rule_alone(fault):
    name = f".buildkite/{fault.says}" if fault.fails == "pipelines" else fault.says
    look = lambda files: {rule: "\n".join(check(files)) for rule, check in RULES.items()}  # noqa: E731
    must_be_noticed(fault, look, instead({name: fault.change}), {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docker/scripts/b.sh", f"#!/usr/bin/env bash\n{linting.LICENSE}\nset -e\n"),
        ("ci/hilgate/__init__.py", ""),
        ("README.md", "https://github.com/home/someone and ~/work/x and results/work/x and ${ROOT}/work/x"),
        ("data.json", "1\n" * 5000),
        ("docs/index.md", f"# A [link](index.md#a)\n\n{'x' * 99}\n\n    {'x' * 88}\n\n```text\n[a](gone.md)\n```\n"),
    ],
)
def test_what_is_allowed_is_not_found(name, text):
    assert [rule({name: text}) for rule in RULES.values()] == [[]] * len(RULES)


LOCKS = {
    "requirements/base.in": "# what everything needs\njinja2\n",
    "docker/rocm.in": "-r ../requirements/base.in\ntypes_PyYAML\nnumba==0.65.0  # as vLLM asks\n",
    "docker/rocm.txt": """jinja2==3.1.6 \\
    --hash=sha256:{0}
    # via
    #   -r ../requirements/base.in
    #   numba
markupsafe==3.0.4 \\
    --hash=sha256:{0}
    # via jinja2
numba==0.65.0 \\
    --hash=sha256:{0}
    # via -r rocm.in
types-pyyaml==6.0 \\
    --hash=sha256:{0}
    # via -r rocm.in
""",
}


@pytest.mark.parametrize(
    ("file", "now", "then", "says"),
    [
        ("requirements/base.in", "jinja2", "jinja2\nrich>=1", "base.in asks for rich>=1, it has none"),
        ("docker/rocm.in", "numba==0.65.0", "numba==0.66.0", "rocm.in asks for numba==0.66.0, it has 0.65.0"),
        ("docker/rocm.in", "types_PyYAML\n", "", "rocm.in no longer asks for types-pyyaml, it has 6.0"),
        ("requirements/base.in", "jinja2", "", "base.in no longer asks for jinja2, it has 3.1.6"),
        ("docker/rocm.txt", "numba==0.65.0", "numba==0.64.0", "rocm.in asks for numba==0.65.0, it has 0.64.0"),
    ],
    ids=["added", "another version", "removed", "removed from an included file", "lock edited"],
)
def test_a_lock_that_does_not_follow_its_input_is_named(file, now, then, says):
    stale_locks = RULES["stale-locks"]
    assert stale_locks(LOCKS) == []
    (found,) = stale_locks(LOCKS | {file: LOCKS[file].replace(now, then)})
    assert found.startswith("docker/rocm.txt: ")
    assert found.endswith(f"/{says}; run docker/lock.sh")


@pytest.mark.parametrize(
    ("command", "outcome", "message"),
    [
        ("python -c pass", Outcome.PASS, ""),
        ("python -c 'print(\"bad line\"); raise SystemExit(1)'", Outcome.FAIL, "exit status 1: bad line"),
        ("python -c 'import os; os.kill(os.getpid(), 9)'", Outcome.DID_NOT_RUN, "exit status -9"),
        ("python -m no_such_linter", Outcome.DID_NOT_RUN, "no_such_linter is not installed"),
        ("no-such-program --check", Outcome.DID_NOT_RUN, "no-such-program is not installed"),
    ],
)
def test_linter_becomes_a_check(tmp_path, command, outcome, message):
    check = lint(Linter("tool", command), [], tmp_path)
    assert check.outcome is outcome
    assert message in check.message
    assert check.labels["command"] == command


def test_endless_linter_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(linting, "TIMEOUT_SECONDS", 0.2)
    check = lint(Linter("tool", "python -c 'import time; time.sleep(60)'"), [], tmp_path)
    assert check.outcome is Outcome.DID_NOT_RUN
    assert "did not finish" in check.message


@pytest.fixture
def repository(tmp_path, monkeypatch):
    root = tmp_path / "repository"
    (root / "ci").mkdir(parents=True)
    (root / "ci" / "agents.yaml").write_text("")
    (root / "ci" / "a.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("HILGATE_OUT", str(tmp_path / "out"))
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("linter", "status"),
    [
        (Linter("fine", "python -c pass"), Exit.PASS),
        (Linter("finds", "python -c 'raise SystemExit(1)'"), Exit.FAIL),
        (Linter("gone", "no-such-program"), Exit.CANNOT_RUN_HERE),
        (Linter("idle", "no-such-program", (".sh",)), Exit.PASS),
    ],
)
@pytest.mark.usefixtures("repository")
def test_status_and_findings(tmp_path, monkeypatch, linter, status):
    monkeypatch.setattr(linting, "LINTERS", (linter,))
    assert linting.main() == status
    checks = [
        Check.model_validate_json(line) for line in (tmp_path / "out" / "findings.jsonl").read_text().splitlines()
    ]
    expected = [linter.id] if not linter.suffixes else []
    assert [check.id for check in checks] == [*expected, *RULES]


def test_house_rule_turns_the_status_red(repository, monkeypatch):
    monkeypatch.setattr(linting, "LINTERS", ())
    (repository / "notes.md").write_text(f"see {HOME}\n")
    assert linting.main() == Exit.FAIL


def test_outside_a_repository_is_an_error_and_not_a_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert linting.main() == Exit.MISUSE
    assert "not inside a repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("[gone](gone.md)", "gone.md"), ("[gone](#gone)", "#gone"), ("![gone](gone.png)", "gone.png"), ("fine", "")],
    ids=["a page", "an anchor", "a picture", "nothing dead"],
)
def test_a_dead_link_is_red(tmp_path, text, said):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n{text}\n")
    validation = yaml.load((ROOT / "mkdocs.yml").read_text(), Unknown)["validation"]
    config = {"site_name": "x", "plugins": [], "validation": validation}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    (linter,) = [one for one in linting.LINTERS if one.id == "site"]
    check = lint(linter, [], tmp_path)
    assert check.outcome is (Outcome.FAIL if said else Outcome.PASS), check.message
    assert said in check.message


def test_what_has_no_sentence_ends_the_build_of_the_site(monkeypatch, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    attack = tmp_path / "tests/attacks/test_loud.py"
    attack.parent.mkdir(parents=True)
    attack.write_text('"""Who: a fork. What: it shouts. What must happen: it is not heard."""\n')
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert "docs/reference/cli.md" in reference.pages()
    monkeypatch.setattr(program, "registered_commands", [*program.registered_commands])

    @program.command()
    def silent() -> None: ...

    with pytest.raises(reference.UndocumentedError, match="silent has no sentence"):
        reference.pages()
    monkeypatch.setattr("sys.argv", ["reference.py"])
    assert reference.main() == Exit.FAIL
    assert capsys.readouterr().err.startswith("error: silent has no sentence\n  to do: ")
    attack.write_text('"""Who: a fork. What: it shouts."""\n')
    with pytest.raises(reference.UndocumentedError, match=r"test_loud\.py does not say who, what and what must happen"):
        reference.attacks()


def test_files_are_appended_for_linters_that_take_files(tmp_path):
    check = lint(
        Linter("tool", 'python -c \'import sys; raise SystemExit(sys.argv[1:] != ["a.sh", "b.sh"])\'', (".sh",)),
        ["a.sh", "b.sh"],
        tmp_path,
    )
    assert check.outcome is Outcome.PASS
