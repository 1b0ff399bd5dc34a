"""Spec files as users write them: what they mean, and one line for each thing wrong in them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import yaml_tree
from launcher.load import (
    LoadedSpec,
    changed_fields,
    dump_overrides,
    expand_path,
    load_spec,
    read_overrides,
)
from trainer.spec.errors import SpecError
from trainer.spec.run import NodeRange, RunSpec

MINIMAL = """\
name: quickstart
model: {kind: vla}
data: {kind: lerobot}
train:
  global_batch_size: 8
  max_steps: 10
"""
ENVIRON = {"HOME": "/home/me", "SCRATCH": "/scratch/me", "EMPTY": "", "MY_TOKEN": "hunter2"}


def load(
    tmp_path: Path,
    text: str | bytes,
    *overrides: str,
    environ: Mapping[str, str] = ENVIRON,
) -> LoadedSpec:
    path = tmp_path / "spec.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_spec(path, overrides, environ=environ, shown_as="spec.yaml")


def faults(tmp_path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The lines that a bad spec prints."""
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text, *overrides)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.faults), "one line a fault"
    return lines


def minimal_with(extra: str) -> str:
    """The minimal spec with lines appended; they may begin inside `train:`."""
    return MINIMAL + extra


def test_a_minimal_spec(tmp_path: Path) -> None:
    loaded = load(tmp_path, MINIMAL)
    assert loaded.spec.name == "quickstart"
    assert loaded.spec.train.max_steps == 10
    assert loaded.text == MINIMAL.encode()
    assert loaded.overrides == ()
    assert loaded.source == "spec.yaml"


def test_the_fault_of_the_contract(tmp_path: Path) -> None:
    text = minimal_with("resources:\n  nodes: 1\n" + "\n" * 5 + "  gpus_per_nod: 2\n")
    assert faults(tmp_path, text) == [
        "spec.yaml:14:3: resources.gpus_per_nod: unknown key; did you mean gpus_per_node?"
    ]


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "+1e-4", "1.0e-4", "0.0001", ".0001"])
def test_floats(tmp_path: Path, written: str) -> None:
    spec = load(tmp_path, minimal_with(f"  learning_rate: {written}\n")).spec
    assert spec.train.learning_rate == 0.0001


@pytest.mark.parametrize(
    ("written", "value"),
    [("010", 10), ("0o10", 8), ("0x10", 16), ("1e4", 10000), ("+5", 5), ("5.", 5), ("!!int 7", 7)],
)
def test_integers_in_the_core_schema(tmp_path: Path, written: str, value: int) -> None:
    spec = load(tmp_path, MINIMAL.replace("max_steps: 10", f"max_steps: {written}")).spec
    assert spec.train.max_steps == value


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("learning_rate: .nan", "7:18: train.learning_rate: must be a finite number, found .nan"),
        ("learning_rate: .inf", "7:18: train.learning_rate: must be a finite number, found .inf"),
        ("learning_rate: 1e999", "7:18: train.learning_rate: must be a finite number, found 1e999"),
        ("learning_rate: -1e-4", "7:18: train.learning_rate: must be more than 0, found -1e-4"),
        ("learning_rate: 0", "7:18: train.learning_rate: must be more than 0, found 0"),
        ("learning_rate: nan", '7:18: train.learning_rate: must be a number, found "nan"'),
        ("learning_rate:", "7:17: train.learning_rate: must be a number, found nothing"),
        ("learning_rate: ~", "7:18: train.learning_rate: must be a number, found ~"),
        (
            'learning_rate: "1e-4"',
            '7:18: train.learning_rate: must be a number, found the text "1e-4"; remove the quotes',
        ),
        (
            "epochs: 1_000",
            '7:11: train.epochs: must be a number, found the text "1_000"; write 1000',
        ),
        (
            "deterministic: yes",
            '7:18: train.deterministic: must be true or false, found the text "yes"; '
            "write true or false",
        ),
        ("seed: 3", "7:3: train.seed: unknown key; it belongs at the top level"),
        ("nodes: 3", "7:3: train.nodes: unknown key; it belongs under resources"),
        ("lr: 3", "7:3: train.lr: unknown key; did you mean learning_rate?"),
        (
            "gpu_per_nod: 3",
            "7:3: train.gpu_per_nod: unknown key; did you mean resources.gpus_per_node?",
        ),
        ("kind: 3", "7:3: train.kind: unknown key; it belongs under model or under data"),
        ("x-a: 3", "7:3: train.x-a: unknown key; known here: strategy, "),
    ],
)
def test_one_fault_in_train(tmp_path: Path, line: str, fault: str) -> None:
    (found,) = faults(tmp_path, minimal_with(f"  {line}\n"))
    assert found.startswith(f"spec.yaml:{fault}")


def test_all_faults_at_once_in_file_order(tmp_path: Path) -> None:
    text = """\
checkpiont: {every: 5}
name: my run
model: {kind: vlaa}
data:
  kind: lerobot
  options: {rot: /x}
train:
  global_batch_size: "8"
  seed: 3
  seed: 4
resources:
  nodes: {min: 2, max: 1, step: 1}
  setup: [ok, 3]
"""
    found = faults(tmp_path, text, "tracking.log_interval=0")
    assert [line.split(": ")[0] + " " + line.split(": ")[1] for line in found] == [
        "spec.yaml:1:1 checkpiont",
        "spec.yaml:2:7 name",
        "spec.yaml:3:15 model.kind",
        "spec.yaml:6:13 data.options.rot",
        "spec.yaml:8:3 train.max_steps",
        "spec.yaml:8:22 train.global_batch_size",
        "spec.yaml:9:3 train.seed",
        "spec.yaml:10:3 train.seed",
        "spec.yaml:12:24 resources.nodes.max",
        "spec.yaml:12:27 resources.nodes.step",
        "spec.yaml:13:15 resources.setup[1]",
        "-o tracking.log_interval must be at least 1, found 0",
    ]


def test_what_is_required_is_missed_at_its_mapping(tmp_path: Path) -> None:
    assert faults(tmp_path, "seed: 1\n") == [
        "spec.yaml:1:1: name: is required",
        "spec.yaml:1:1: model.kind: is required",
        "spec.yaml:1:1: data.kind: is required",
        "spec.yaml:1:1: train.max_steps: one of max_steps and epochs is required: "
        "how long to train",
        "spec.yaml:1:1: train.global_batch_size: is required",
    ]
    text = "name: a\nmodel: {kind: vla}\ndata: {options: {}}\ntrain:\n  max_steps: 3\n"
    assert faults(tmp_path, text) == [
        "spec.yaml:3:7: data.kind: is required",
        "spec.yaml:5:3: train.global_batch_size: is required",
    ]
    assert faults(tmp_path, MINIMAL + "resources: {nodes: {min: 2}}\n") == [
        "spec.yaml:7:20: resources.nodes.max: is required"
    ]


LEVELS = [
    "",
    "model",
    "model.options",
    "data",
    "data.options",
    "train",
    "checkpoint",
    "resources",
    "resources.nodes",
    "retry",
    "tracking",
    "tracking.wandb",
]


@given(key=st.from_regex(r"[a-wyz_][a-z0-9_]{0,20}", fullmatch=True))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("level", LEVELS)
def test_a_random_unknown_key_is_refused_at_every_level(
    tmp_path: Path, level: str, key: str
) -> None:
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    data |= {
        "resources": {"nodes": {"min": 1, "max": 2}},
        "tracking": {"wandb": {"mode": "offline"}},
    }
    data |= {"checkpoint": {"keep_last": 3}, "retry": {"max_no_progress": 2}}
    data["model"]["options"] = {"dim": 64}
    data["data"]["options"] = {"chunk": 4}
    inner = data
    for part in filter(None, level.split(".")):
        inner = inner[part]
    path = f"{level}.{key}".removeprefix(".")
    known = load(tmp_path, yaml.safe_dump(data, sort_keys=False)).spec.model_dump()
    for part in filter(None, level.split(".")):
        known = known[part]
    if key in known:
        return
    inner[key] = "UNKNOWN"
    text = yaml.safe_dump(data, sort_keys=False)
    (line,) = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith(": UNKNOWN")]
    (found,) = faults(tmp_path, text)
    assert found.startswith(f"spec.yaml:{line}:")
    assert f": {path}: unknown key" in found


def test_list_items_have_a_place_too(tmp_path: Path) -> None:
    text = minimal_with("resources:\n  setup:\n    - a\n    - {gpus: 2}\n")
    assert faults(tmp_path, text) == [
        "spec.yaml:10:7: resources.setup[1]: must be text, found a mapping"
    ]


# ---- encoding, documents, syntax -------------------------------------------------------------


def test_bom_and_crlf_read_as_plain_utf_8(tmp_path: Path) -> None:
    plain = load(tmp_path, MINIMAL).spec
    windows = MINIMAL.replace("\n", "\r\n").encode()
    assert load(tmp_path, b"\xef\xbb\xbf" + windows).spec == plain
    assert load(tmp_path, b"\xef\xbb\xbf" + windows).text.startswith(b"\xef\xbb\xbf")
    bad = b"\xef\xbb\xbf" + windows + b"\r\nretri: 1\r\n"
    assert faults(tmp_path, bad) == ["spec.yaml:8:1: retri: unknown key; did you mean retry?"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("name: t\xe4st\n".encode("latin-1"), "not UTF-8: byte 0xE4 at offset 7"),
        (b"\xef\xbb\xbf\xff", "not UTF-8: byte 0xFF at offset 3"),
        (MINIMAL.encode("utf-16"), "not UTF-8: byte 0xFF at offset 0"),
        (b"", "spec.yaml:1:1: is empty"),
        (b"\n\n", "spec.yaml:1:1: is empty"),
        (b"# only\n# comments\n", "spec.yaml:1:1: is empty"),
        (b"---\n...\n", "spec is a mapping of keys to values, this is a single value"),
        (b"- a\n- b\n", "spec.yaml:1:1: a spec is a mapping of keys to values, this is a list"),
        (b"# x\nhello\n", "spec.yaml:2:1: a spec is a mapping of keys to values, this is a single"),
        (MINIMAL.encode() + b"---\nname: b\n", "spec.yaml:7:1: a second document begins here"),
        (b"train:\n\tmax_steps: 3\n", "spec.yaml:2:1: a tab in the indentation"),
        (b"name: a\n  model: b\n", "spec.yaml:2:8: not YAML: mapping values are not allowed"),
        (b"name: [a\n", "not YAML: "),
        (b'name: "a\n', "not YAML: "),
        (b"name: a\x00b\n", "spec.yaml:1:8: the character U+0000 cannot stand in a spec"),
        (b"name: a\r\nseed: \x1b[2J\n", "spec.yaml:2:7: the character U+001B cannot"),
        (b"# a\xe2\x80\xa8name: b\n", "spec.yaml:1:4: the character U+2028 cannot"),
        (b"a: *nope\n", "spec.yaml:1:4: no anchor &nope"),
        (b"a: &x [1, *x]\n", "spec.yaml:1:11: the alias *x stands within its own anchor"),
        (b"a: &x {b: *x}\n", "spec.yaml:1:11: the alias *x stands within its own anchor"),
        (b"%FOO bar\n--- a\n", "not YAML: "),
        (b"x" * (2**20 + 1), "spec.yaml: is larger than 1 MiB"),
        (b"[" * 900, "spec.yaml:1:65: nested more than 64 levels deep"),
        (b"[" * 500_000, "nest"),
        (b"- " * 5000, "spec.yaml:1:129: nested more than 64 levels deep"),
        (b"a: [" + b"1," * 100_001 + b"]", "more than 100000 values"),
    ],
)
def test_unreadable_text_is_one_fault(tmp_path: Path, data: bytes, fault: str) -> None:
    (found,) = faults(tmp_path, data)
    assert fault in found
    assert found.isprintable()


def test_depth_and_count_are_limited_with_aliases_written_out(tmp_path: Path) -> None:
    at_limit = minimal_with("x-deep: " + "[" * 63 + "]" * 63 + "\n")
    load(tmp_path, at_limit)
    (found,) = faults(tmp_path, minimal_with("x-deep: " + "[" * 64 + "]" * 64 + "\n"))
    assert "nested more than 64" in found
    half = "x-a: &a " + "[" * 40 + "]" * 40 + "\nx-b: " + "[" * 30 + "*a" + "]" * 30 + "\n"
    (found,) = faults(tmp_path, minimal_with(half))
    assert "nested more than 64" in found
    laughs = "x-0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
        f"x-{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 30)
    )
    (found,) = faults(tmp_path, minimal_with(laughs))
    assert "more than 100000 values" in found
    keys = ", ".join(f"k{n}: 1" for n in range(20_000))
    merges = f"x-0: &m {{{keys}}}\n" + "".join(f"x-{n}: {{<<: *m}}\n" for n in range(1, 1000))
    (found,) = faults(tmp_path, minimal_with(merges))
    assert "more than 100000 values" in found


# ---- keys, tags, merges ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ("seed: 1\nseed: 1\n", "8:1: seed: written twice, on line 7 and on line 8"),
        ('seed: 1\n"seed": 2\n', "8:1: seed: written twice, on line 7 and on line 8"),
        ("x-a:\n  b: {c: 1, c: 2}\n", "8:13: x-a.b.c: written twice, on line 8 and on line 8"),
        ("null: 1\n", '7:1: a key must be text; quote it: "null"'),
        ("7: 1\n", '7:1: a key must be text; quote it: "7"'),
        ("resources: {env: {1: a}}\n", '7:19: resources.env: a key must be text; quote it: "1"'),
        ("? [a]\n: 1\n", "7:3: a key must be text, not a mapping or a list"),
        ("retry: {<<: 3}\n", "7:9: retry: `<<` takes a mapping or a list of mappings"),
        ("retry: {<<: [{}, 3]}\n", "7:9: retry: `<<` takes a mapping or a list of mappings"),
        ("retry: {<<: {}, <<: {}}\n", "7:17: retry: `<<` stands twice"),
        ('retry: {"<<": {}}\n', '7:9: retry."<<": unknown key'),
        (
            "run_root: !!python/object/apply:os.system [touch x]\n",
            "7:11: run_root: the tag !!python/",
        ),
        ("run_root: !!python/name:os.system\n", "7:11: run_root: the tag !!python/name:os.system"),
        ("run_root: !Ref x\n", "7:11: run_root: the tag !Ref means nothing in a spec"),
        ("run_root: !!binary aGk=\n", "7:11: run_root: the tag !!binary"),
        ("run_root: !!timestamp 2020-01-01\n", "7:11: run_root: the tag !!timestamp"),
        ("resources: !!set {a}\n", "7:12: resources: the tag !!set"),
        ("seed: !!int x\n", "7:7: seed: is tagged !!int and is none"),
        ("seed: !!map x\n", "7:7: seed: the tag !!map"),
        ("seed: " + "9" * 5000 + "\n", "7:7: seed: a number of more than 100 characters"),
        ("seed: " + "0" * 5000 + "\n", "7:7: seed: a number of more than 100 characters"),
        ("seed: -1." + "0" * 5000 + "\n", "7:7: seed: a number of more than 100 characters"),
        ("seed: 0x" + "f" * 5000 + "\n", "7:7: seed: a number of more than 100 characters"),
        ("seed: " + "9" * 100 + "\n", "7:7: seed: must be at most 9223372036854775807, found 9999"),
    ],
)
def test_one_fault_after_the_minimal_spec(tmp_path: Path, extra: str, fault: str) -> None:
    found = faults(tmp_path, minimal_with(extra))
    assert found[0].startswith(f"spec.yaml:{fault}")
    assert len(found) == 1
    assert len(found[0]) < 350


def test_core_tags_are_understood(tmp_path: Path) -> None:
    text = minimal_with(
        "seed: !!int 7\nrun_root: !!null ''\nresources: !!map\n  partition: !!str 12\n"
        "  account: ! 13\n  setup: !!seq [a]\n"
    )
    spec = load(tmp_path, text).spec
    assert (spec.seed, spec.run_root, spec.resources.partition) == (7, None, "12")
    assert (spec.resources.account, spec.resources.setup) == ("13", ("a",))


def test_merges(tmp_path: Path) -> None:
    text = """\
x-base: &base
  learning_rate: 3e-4
  weight_decay: 0.5
  warmup_ratio: 0.5
x-other: &other {weight_decay: 0.7, replicate: 1}
name: merged
model: &kind {kind: vla}
data: {kind: lerobot}
train:
  warmup_ratio: 0.25
  <<: [*base, *other]
  global_batch_size: 8
  max_steps: &steps 10
  freeze_steps: 0
checkpoint: {save_interval: *steps}
"""
    spec = load(tmp_path, text).spec
    assert spec.train.learning_rate == 3e-4
    assert (spec.train.weight_decay, spec.train.warmup_ratio) == (0.5, 0.25)
    assert spec.checkpoint.save_interval == 10


def test_a_merged_key_is_blamed_where_it_stands(tmp_path: Path) -> None:
    text = "x-base: &base\n  seeds: 3\n" + MINIMAL + "  <<: *base\n"
    (found,) = faults(tmp_path, text)
    assert found.startswith("spec.yaml:2:3: train.seeds: unknown key; did you mean seed?")
    text = "x-steps: &n 0\n" + MINIMAL.replace("max_steps: 10", "max_steps: *n")
    assert faults(tmp_path, text) == [
        "spec.yaml:7:14: train.max_steps: must be at least 1, found 0"
    ]


def test_text_that_yaml_1_1_takes_for_something_else(tmp_path: Path) -> None:
    text = minimal_with(
        "resources:\n  time: 24:00:00\n  partition: on\n  account: 2024-01-01\n"
        "  env: {A: 010, B: 1e3, C: 0x1F, D: off, E: ~, F: '7', G: 1_000, H: 1.50}\n"
        "  additional_parameters: {nice: 010, begin: 16:00, hold: true, mcs-label: ''}\n"
    )
    resources = load(tmp_path, text).spec.resources
    assert resources.time == "24:00:00"
    assert resources.time_limit_min == 1440
    assert (resources.partition, resources.account) == ("on", "2024-01-01")
    assert resources.env == {
        "A": "010",
        "B": "1e3",
        "C": "0x1F",
        "D": "off",
        "E": None,
        "F": "7",
        "G": "1_000",
        "H": "1.50",
    }
    assert resources.additional_parameters == {
        "nice": "010",
        "begin": "16:00",
        "hold": True,
        "mcs-label": True,
    }


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("no", 'other YAML readers take no for a boolean; quote it: "no"'),
        ("On", 'other YAML readers take On for a boolean; quote it: "On"'),
        ("true", "must be text, found true; quote it"),
        ("2024", "must be text, found 2024; quote it"),
        ("1e3", "must be text, found 1e3; quote it"),
        ("null", "must be text, found null"),
        ("", "must be text, found nothing"),
        ("[a]", "must be text, found a list"),
    ],
)
def test_names_that_want_quotes(tmp_path: Path, written: str, problem: str) -> None:
    (found,) = faults(tmp_path, MINIMAL.replace("quickstart", written))
    assert found.endswith(f": name: {problem}")
    if written and written != "[a]":
        quoted = MINIMAL.replace("quickstart", f'"{written}"')
        assert load(tmp_path, quoted).spec.name == written


@pytest.mark.parametrize(
    ("written", "expected"), [("2", 2), ("2.0", 2), ("{min: 1, max: 4}", NodeRange(min=1, max=4))]
)
def test_nodes(tmp_path: Path, written: str, expected: int | NodeRange) -> None:
    text = minimal_with(f"resources: {{nodes: {written}}}\n")
    assert load(tmp_path, text).spec.resources.nodes == expected


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("true", "whole number, found true"),
        ("'8'", "remove the quotes"),
        ("0", "at least 1"),
        ("-1", "at least 1"),
        ("1.5", "whole number, found 1.5"),
        ("1_000", "write 1000"),
        ("[1, 2]", "{min: 2, max: 8}"),
    ],
)
def test_bad_nodes(tmp_path: Path, written: str, says: str) -> None:
    (found,) = faults(tmp_path, minimal_with(f"resources: {{nodes: {written}}}\n"))
    assert found.startswith("spec.yaml:7:20: resources.nodes: ")
    assert says in found


# ---- the file --------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "is a directory, not a spec file"),
        (tmp_path / "a\0b", "is no path of a file"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            load_spec(path, environ={})
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "täst.yaml"
    path.write_text(MINIMAL + "run_root: /data/täst-日本\n", encoding="utf-8")
    code = (
        "import sys, pathlib, launcher.load as l;"
        "s = l.load_spec(pathlib.Path(sys.argv[1]), environ={}).spec;"
        "sys.stdout.buffer.write(s.run_root.encode())"
    )
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environ, capture_output=True, check=True
    )
    assert done.stdout.decode() == "/data/täst-日本"


def test_loading_imports_neither_torch_nor_the_store(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(MINIMAL)
    code = (
        "import sys, pathlib, launcher.load as l;"
        "l.load_spec(pathlib.Path(sys.argv[1]), environ={});"
        "sys.exit(bool({'torch', 'numpy', 'fsspec', 'submitit', 'wandb'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


# ---- paths -----------------------------------------------------------------------------------


def test_paths_are_filled_in(tmp_path: Path) -> None:
    text = """\
name: paths
run_root: ~/runs
model: {kind: vla}
data: {kind: lerobot, options: {root: "${SCRATCH}/data"}}
train: {global_batch_size: 8, max_steps: 1}
checkpoint:
  uri: s3://bucket/${SCRATCH}/{name}/{run_id}/{other}/$HOME
  init_from: "~"
resources:
  setup: ['cd ${SCRATCH} ~']
  env: {WHERE: '${SCRATCH}/~'}
"""
    spec = load(tmp_path, text).spec
    assert spec.run_root == "/home/me/runs"
    assert spec.data.options["root"] == "/scratch/me/data"
    assert spec.checkpoint.uri == "s3://bucket//scratch/me/{name}/{run_id}/{other}/$HOME"
    assert spec.checkpoint.init_from == "/home/me"
    assert spec.resources.setup == ("cd ${SCRATCH} ~",)
    assert spec.resources.env == {"WHERE": "${SCRATCH}/~"}
    assert load(tmp_path, MINIMAL, "run_root=${SCRATCH}").spec.run_root == "/scratch/me"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("${NOPE}/x", "${NOPE}, and NOPE is not set"),
        ("${EMPTY}/x", "${EMPTY}, and EMPTY is not set"),
        ("${}/x", "not ${NAME}"),
        ("${A:-b}", "not ${NAME}"),
        ("${SCRATCH", "not ${NAME}"),
        ("~other/x", "~user"),
        ("s3://b/${MY_TOKEN}", "looks like a secret"),
    ],
)
def test_paths_that_cannot_be_filled_in(tmp_path: Path, written: str, says: str) -> None:
    (found,) = faults(tmp_path, minimal_with(f'run_root: "{written}"\n'))
    assert found.startswith("spec.yaml:7:11: run_root: ")
    assert says in found
    assert "hunter2" not in found


def test_a_filled_in_path_is_checked_like_any_other(tmp_path: Path) -> None:
    for value in ("https://user:hunter2@host", "a\nb"):
        with pytest.raises(SpecError) as caught:
            load(tmp_path, minimal_with("run_root: ${BAD}\n"), environ={"BAD": value})
        assert str(caught.value).startswith("spec.yaml:7:11: run_root: holds a")
        assert "hunter2" not in str(caught.value)


def test_expand_path_is_pure() -> None:
    assert expand_path("a/~/b", environ={}, home=None) == "a/~/b"
    assert expand_path("${A}/x", environ={"A": "~"}, home="/h") == "/h/x"
    assert expand_path("${A}", environ={"A": "${B}"}, home=None) == "${B}"
    with pytest.raises(ValueError, match="HOME is not set"):
        expand_path("~/x", environ={}, home=None)


def test_without_home_the_user_database_knows_it(tmp_path: Path) -> None:
    spec = load(tmp_path, minimal_with("run_root: ~/x\n"), environ={}).spec
    assert spec.run_root is not None
    assert Path(spec.run_root).is_absolute()


# ---- overrides -------------------------------------------------------------------------------


def test_overrides(tmp_path: Path) -> None:
    given_overrides = (
        "train.learning_rate=3e-4",
        "seed=1",
        "tracking.wandb.mode=offline",
        "resources.env={A: 010}",
        "resources.setup=[a, b]",
        "train.max_grad_norm=null",
        "seed=2",
        "resources.time=1:30",
        " train.epochs = 2 ",
        "checkpoint.uri=s3://b/x=y",
    )
    loaded = load(tmp_path, minimal_with("tracking:\n  wandb: null\n"), *given_overrides)
    spec = loaded.spec
    assert (spec.train.learning_rate, spec.seed, spec.train.epochs) == (3e-4, 2, 2.0)
    assert spec.tracking.wandb is not None
    assert spec.tracking.wandb.mode == "offline"
    assert spec.resources.env == {"A": "010"}
    assert spec.resources.setup == ("a", "b")
    assert spec.train.max_grad_norm is None
    assert spec.resources.time_limit_min == 2
    assert spec.checkpoint.uri == "s3://b/x=y"
    assert loaded.overrides == tuple(o for o in given_overrides if o != "seed=1")
    assert load(tmp_path, loaded.text, *loaded.overrides).spec == spec


def test_an_override_mends_the_file(tmp_path: Path) -> None:
    text = MINIMAL.replace("max_steps: 10", "max_steps: ten")
    assert load(tmp_path, text, "train.max_steps=3").spec.train.max_steps == 3
    assert (
        load(tmp_path, text, "train={max_steps: 3, global_batch_size: 4}").spec.train.max_steps == 3
    )


def test_an_override_does_not_reach_what_shares_an_anchor(tmp_path: Path) -> None:
    text = minimal_with(
        "x-n: &n {min: 1, max: 2}\nresources: {nodes: *n}\nretry: &r {max_error_restarts: 1}\n"
    )
    own = text.replace("model: {kind: vla}", "model: {kind: 'm:f', options: {a: &o {b: 1}, c: *o}}")
    spec = load(tmp_path, own, "model.options.a.b=5", "resources.nodes.max=9").spec
    assert spec.model.options == {"a": {"b": 5}, "c": {"b": 1}}
    assert spec.resources.nodes == NodeRange(min=1, max=9)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("train.learning_rate=0", "-o train.learning_rate: must be more than 0, found 0"),
        ("train.max_stps=5", "-o train.max_stps: unknown key; did you mean max_steps?"),
        ("trian.x.y=5", "-o trian.x.y: trian: unknown key; did you mean train?"),
        ("resources.nodes={min: 2}", "-o resources.nodes: resources.nodes.max: is required"),
        ("name.first=5", "-o name.first: name is no mapping; override name as a whole"),
        ("train.max_steps=", "-o train.max_steps: has no value; write null for none"),
        ("train.max_steps=# 5", "-o train.max_steps: has no value; write null for none"),
        ("train.max_steps=[", "-o train.max_steps: not YAML: "),
        ("train.max_steps=*a", "-o train.max_steps: no anchor &a"),
        ("train.max_steps=!x 5", "-o train.max_steps: the tag !x means nothing"),
        ("resources.env={A: 1, A: 2}", "-o resources.env: resources.env.A: written twice"),
        ("resources.env.HF_TOKEN=hunter2", "-o resources.env.HF_TOKEN: looks like a secret"),
        ("train.max_steps", "-o train.max_steps: write KEY=VALUE"),
        ("", "-o : write KEY=VALUE"),
        ("=5", "-o =5: write KEY=VALUE"),
        ("a..b=5", "-o a..b=5: write KEY=VALUE"),
        ("a b=5", "-o a b=5: write KEY=VALUE"),
        (".a=5", "-o .a=5: write KEY=VALUE"),
        ("a." * 64 + "a=5", "-o a.a.a."),
        ("HF_TOKEN hunter2", "-o ...: write KEY=VALUE"),
        ("x-a=5", "-o x-a: x- keys are ignored"),
        ("run_root=\x1b[2J", "-o run_root: the character U+001B cannot"),
        ("a\x1b=5", "-o "),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, fault: str) -> None:
    (found,) = faults(tmp_path, MINIMAL, override)
    assert found.startswith(fault)
    assert found.isprintable()
    assert "hunter2" not in found


def test_overrides_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "overrides.yaml"
    for overrides in ((), ("train.max_steps=5", 'name="a"', "run_root=/täst: [x]")):
        path.write_bytes(dump_overrides(overrides))
        assert read_overrides(path) == overrides
        assert yaml.safe_load(path.read_text(encoding="utf-8")) == list(overrides)
    for bad in ("a: 1\n", "- 1\n", "[", "", "- [a]\n"):
        path.write_text(bad)
        with pytest.raises(SpecError):
            read_overrides(path)


def test_changed_fields(tmp_path: Path) -> None:
    text = minimal_with("resources: {nodes: {min: 1, max: 2}, env: {A: '1', B: '2'}}\n")
    old = load(tmp_path, text).spec
    assert changed_fields(old, load(tmp_path, text).spec) == []
    new = load(
        tmp_path,
        text,
        "tracking.wandb={mode: offline}",
        "resources.env={C: x, B: '2'}",
        "resources.nodes.max=3",
        "train.max_steps=11",
        "train.betas=[0.9, 0.99]",
        "seed=7",
        "model.options.dim=64",
    ).spec
    assert changed_fields(old, new) == [
        "seed",
        "model.options.dim",
        "train.max_steps",
        "train.betas",
        "resources.nodes.max",
        "resources.env.A",
        "resources.env.C",
        "tracking.wandb",
    ]
    fixed = load(tmp_path, text, "resources.nodes=2").spec
    assert changed_fields(old, fixed) == ["resources.nodes"]


# ---- secrets ---------------------------------------------------------------------------------


def test_secrets_are_refused_and_never_shown(tmp_path: Path) -> None:
    marker = "hunter2Marker"
    text = minimal_with(f"""\
resources:
  env: {{HF_TOKEN: {marker}, AWS_SECRET_ACCESS_KEY: 123, WANDB_API_KEY: null}}
  additional_parameters: {{api_key: {marker}}}
  setup: ["git clone https://u:{marker}@host/x"]
  account: "{marker}://{marker}@host"
checkpoint:
  uri: s3://AKIA:{marker}/x@bucket
  storage_options: {{client_kwargs: {{aws_secret_access_key: {marker}, n: 3}}}}
tracking: {{wandb: {marker}}}
""")
    found = faults(tmp_path, text)
    assert [re.sub(r"spec.yaml:\d+:\d+: ([^:]*):.*", r"\1", line) for line in found] == [
        "resources.env.HF_TOKEN",
        "resources.env.AWS_SECRET_ACCESS_KEY",
        "resources.additional_parameters.api_key",
        "resources.setup[0]",
        "resources.account",
        "checkpoint.uri",
        "checkpoint.storage_options.client_kwargs.aws_secret_access_key",
        "tracking.wandb",
    ]
    assert marker not in "\n".join(found)
    assert "write HF_TOKEN: null" in found[0]


# ---- any text --------------------------------------------------------------------------------


PIECES = st.sampled_from(
    [
        *("name", "model", "train", "resources", "nodes", "env", "setup", "x-a", "kind", "time"),
        *(": ", ":", "\n", "\n  ", "- ", ", ", "{", "}", "[", "]", "&a ", "*a", "<<", "!!int "),
        *("!x ", "|\n", ">-\n", '"', "'", "#", "\t", "\r\n", "---\n", "...\n", "? ", "%", "@", "`"),
        *(
            "1",
            "1e4",
            "1_000",
            ".nan",
            "-.inf",
            "0x1F",
            "null",
            "~",
            "yes",
            "true",
            "vla",
            "9" * 150,
        ),
        *("\\ud800", "\\x00", "\ufeff", "\u2028", "\x85", "é", "😀", "${HOME}", "s3://u:p@h/"),
    ]
)


@given(
    text=st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=60),
    override=st.lists(PIECES, max_size=6).map("".join) | st.just("train.max_steps=1"),
    whole=st.booleans(),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_text_loads_or_is_refused_in_lines(
    tmp_path: Path, text: str, override: str, whole: bool
) -> None:
    data = (text if whole else MINIMAL + text).encode("utf-8", "surrogatepass")
    try:
        spec = load(tmp_path, data, override).spec
    except SpecError as err:
        for fault in err.faults:
            assert str(fault).isprintable()
            assert str(fault).startswith(("spec.yaml:", "-o "))
            assert "cannot be used" not in str(fault), "pydantic's own words"
    else:
        assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@given(data=st.binary(max_size=80))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError):
        load(tmp_path, data)


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML without its C parser")
@given(text=st.lists(PIECES, max_size=20).map("".join))
@settings(max_examples=80, deadline=None)
def test_both_parsers_of_pyyaml_make_the_same_tree(text: str) -> None:
    # What the parsers say of a syntax error differs; what they make of sound text must not.
    trees: list[object] = []
    for parser in (yaml.CSafeLoader, yaml.SafeLoader):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_tree, "_LOADER", parser)
            try:
                root, found = yaml_tree.compose(text)
            except yaml_tree.NotReadable:
                trees.append(None)
            else:
                trees.append((outline(root), found))
    if None not in trees:
        assert trees[0] == trees[1]


def outline(node: yaml_tree.Node | None) -> object:
    match node:
        case yaml_tree.Table():
            return [(k, e.key_place, outline(e.node)) for k, e in node.entries.items()], node.place
        case yaml_tree.Listing():
            return [outline(item) for item in node.items], node.place
        case yaml_tree.Scalar():
            # Where nothing stands, the parsers see it at different ends of nothing.
            return repr(node.value), node.text, node.place if node.text else None
        case None:
            return None


def test_a_file_that_is_no_spec_at_all_is_refused_in_good_time(tmp_path: Path) -> None:
    data = "".join(f"key_{n}: {n}\n" for n in range(10_000))
    assert len(faults(tmp_path, data)) > 10_000


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    faults(tmp_path, "name: 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]
