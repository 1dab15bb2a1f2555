"""One loader for every YAML text: a key that stands twice is refused, with both lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository_paths import ROOT

from stateset_agents.cli.train import overrides
from stateset_agents.runtime.yaml_files import parse_yaml, read_yaml
from stateset_agents.training.components import read_spec
from stateset_agents.training.experiment import load_experiment
from stateset_agents.types.errors import ConfigurationError

PACKAGE = ROOT / "stateset_agents"


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "desk.yaml"
    path.write_text("environment: retail_desk\ntraining:\n  seed: 1\n  beta: 0.1\n  seed: 2\n")
    with pytest.raises(
        ConfigurationError, match=r"desk.yaml: training.seed stands twice, in lines 3 and 5: k"
    ):
        load_experiment(path)
    path.write_text("training: {seed: 1}\nenvironment: retail_desk\n'training': {beta: 0.1}\n")
    with pytest.raises(
        ConfigurationError, match=r"training stands twice, in lines 1 and 3: keep one of them"
    ):
        load_experiment(path)
    with pytest.raises(ConfigurationError, match=r"^reward '{.*}': name stands twice, in line 1: keep"):
        read_spec("reward", "{name: task, name: helpful}")
    with pytest.raises(ConfigurationError, match=r"--set 'reward={a: 1, a: 2}': the value: a stands twice"):
        overrides(["reward={a: 1, a: 2}"], {})
    with pytest.raises(ConfigurationError, match=r"x: terms\[1\].weight stands twice, in lines 3 and 4"):
        parse_yaml("terms:\n- {weight: 1}\n- weight: 1\n  weight: 2\n", of="x")


def test_what_is_merged_may_be_said_again() -> None:
    text = "base: &base {seed: 1, beta: 2}\nmine: {<<: *base, seed: 3}\nother: *base\n"
    assert parse_yaml(text, of="x")["mine"] == {"seed": 3, "beta": 2}
    assert parse_yaml("", of="x") is None
    assert parse_yaml("{1: a, '1': b}", of="x") == {1: "a", "1": "b"}


def _bomb(node: str, first: str) -> str:
    """Twelve values, each of nine of the one before it: written out 9 ** 12."""
    values = [node.format(", ".join([first] * 9)) if first == "x" else first]
    values += [node.format(", ".join([f"*a{number}"] * 9)) for number in range(12)]
    return "\n".join(f"a{number}: &a{number} {value}" for number, value in enumerate(values))


def test_an_alias_may_stand_for_a_long_list() -> None:
    text = "base: &base [" + "1, " * 9_000 + "1]\nothers: [" + "*base, " * 9 + "*base]\n"
    assert sum(map(len, parse_yaml(text, of="x")["others"])) == 90_010


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "x is not YAML: while parsing"),
        ("a: 2024-99-99", "x is not YAML: month must be in"),
        ("[" * 5000 + "]" * 5000, "x is not YAML that can be read: it is nested too deeply"),
        ("a: !!python/object:os.system {}", "x is not YAML: could not determine a constructor"),
        ("a: b\0", "x is not YAML: unacceptable character #x0000"),
        ("a: !!bool maybe", "x is not YAML: a value does not fit its tag"),
        ("a: !!timestamp soon", "x is not YAML: a value does not fit its tag"),
        ("a: !!int ''", "x is not YAML: a value does not fit its tag"),
        *(
            (f"a: {{b: [{text}]}}", f"x: a.b[0]: {text[:20]}... is a number of {len(text):,} characters: wri")
            for text in ("0x" + "f" * 5000, "1" + ":1" * 5000, "1" + ":1" * 300 + ".5", "-" + "7" * 5000)
        ),
        ("? [0b" + "1" * 5000 + "]\n: 1", "x: a key[0]: 0b111111111111111111... is a number of 5,002 char"),
        ("a: &a [*a]", "x: the alias in line 1 contains itself"),
        ("a:\n  b: &b\n    <<: *b", "x: the alias in line 2 contains itself"),
        (_bomb("[{}]", "x"), "x: its aliases stand for more than 100,000 values"),
        (_bomb("{{<<: [{}]}}", "{k: 1}"), "x: its aliases stand for more than 100,000 values"),
    ],
)
def test_what_is_not_yaml_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as error:
        parse_yaml(text, of="x")
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"a.yaml is not YAML: 'utf-8' codec"):
        read_yaml(tmp_path / "a.yaml")


def test_nothing_else_in_the_package_loads_yaml() -> None:
    loads = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"yaml\.(\w+_)?load|SafeLoader", path.read_text(encoding="utf-8"))
    ]
    assert loads == ["yaml_files.py"]


def test_a_list_of_rewards_is_told_of_the_composite(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environment: retail_desk\nreward: [helpful, task]\n")
    with pytest.raises(ConfigurationError, match=r"reward: several are \{name: composite, terms: "):
        load_experiment(path)
