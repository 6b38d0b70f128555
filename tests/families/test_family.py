# SPDX-License-Identifier: Apache-2.0
"""Families are read from YAML; whatever is wrong with a declaration is said with its place and what is wanted."""

from __future__ import annotations

import pytest

from families.family import FAMILIES, DeclarationError, load

GOOD = """
shared:
  sizes: &sizes {hidden_size: 64, num_layers: 2}
families:
  small:
    architecture: SmallForCausalLM
    attention: paged
    config_class: SmallConfig
    config: {<<: *sizes, num_layers: 4}
    cannot: {cpu: never, cuda: {spec: 'wrong|off by \\d'}}
"""


def read(tmp_path, text):
    (tmp_path / "some.yaml").write_text(text)
    return load(tmp_path / "some.yaml")


def test_a_declaration_and_what_it_shares(tmp_path):
    small = read(tmp_path, GOOD)["small"]
    assert small.config == {"hidden_size": 64, "num_layers": 4}
    assert (small.limit("cpu"), small.limit("cpu", "decode"), small.limit("rocm", "spec")) == ("never", "never", None)
    assert (small.limit("cuda"), small.limit("cuda", "decode")) == (None, None)
    assert small.limit("cuda", "spec") == r"wrong|off by \d"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("attention: paged", "atention: paged", "families.small: got 'atention'; did you mean attention.* expected"),
        ("attention: paged", "attention: pagd", r"families.small.attention: got 'pagd'; did you mean paged\?"),
        ("attention: paged", "attention: [paged]", r"families.small.attention: got \['paged'\]; expected text"),
        ("attention: paged", "states: conv", "families.small.states: got 'conv'; expected a list"),
        ("attention: paged", "states: [cov]", "families.small.states: got 'cov'; did you mean conv"),
        ("    attention: paged\n", "", "families.small: neither attention nor states"),
        ("attention: paged", "architecture: Other", "the key architecture stands twice"),
        ("    architecture: SmallForCausalLM\n", "", "families.small: the key architecture is missing"),
        ("cpu: never", "tpu: never", "families.small.cannot: got 'tpu'; did you mean cpu"),
        ("spec: ", "specs: ", "families.small.cannot.cuda: got 'specs'; did you mean spec"),
        ("cpu: never", "cpu: '('", r"families.small.cannot.cpu: '\(' is no regular expression"),
        ("cpu: never", "cpu: 3", "families.small.cannot.cpu: 3 is no regular expression"),
        ("families:", "family:", "got 'family'; did you mean families"),
        ("*sizes", "*size", "found undefined alias"),
        (GOOD, "", "expected a mapping of shared, families"),
        (GOOD, "families: {}", "no families"),
        (GOOD, "families: {a: b}", "families.a: got 'b'; expected a mapping of architecture"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(old, new, problem, tmp_path):
    with pytest.raises(DeclarationError, match=rf"^some\.yaml.*{problem}"):
        read(tmp_path, GOOD.replace(old, new))


def test_a_platform_that_there_is_not_is_refused():
    with pytest.raises(KeyError, match="platform 'tpu'"):
        FAMILIES["jamba"].arguments("tpu")
