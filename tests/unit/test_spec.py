"""The models of the spec: defaults, bounds, rules between fields, secrets, JSON and back."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS, VlaOptions
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.run import NodeRange, RunSpec
from trainer.spec.safety import (
    REFUSED_SBATCH_OPTIONS,
    has_user_info,
    looks_secret,
    sbatch_option_problem,
)

MINIMAL: dict[str, Any] = {
    "name": "quickstart",
    "model": {"kind": "vla"},
    "data": {"kind": "lerobot"},
    "train": {"global_batch_size": 8, "max_steps": 10},
}


def spec_with(path: str = "", value: Any = None) -> dict[str, Any]:
    """The minimal spec with one field, by its dotted path, set."""
    data = copy.deepcopy(MINIMAL)
    if path:
        *above, key = path.split(".")
        inner = data
        for part in above:
            inner = inner.setdefault(part, {})
        inner[key] = value
    return data


def value_at(spec: RunSpec, path: str) -> Any:
    found: Any = spec
    for part in path.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def problems(data: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by dotted path; the message of a refusal is the sentence shown to users."""
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(data)
    return {".".join(map(str, e["loc"])): e["msg"] for e in caught.value.errors()}


def test_defaults_are_those_of_the_contract() -> None:
    spec = RunSpec.model_validate(MINIMAL)
    expected = yaml.safe_load("""
      name: quickstart
      seed: 42
      run_root: null
      model: {kind: vla}
      data: {kind: lerobot, num_workers: 2, prefetch_factor: 2}
      train:
        strategy: ddp
        replicate: 1
        epochs: null
        max_steps: 10
        global_batch_size: 8
        per_device_batch_size: null
        max_per_device_batch_size: null
        learning_rate: 1.0e-4
        weight_decay: 0.1
        betas: [0.9, 0.95]
        max_grad_norm: 1.0
        lr_scheduler_type: linear-warmup+cosine-decay
        warmup_ratio: 0.03
        freeze_steps: 0
        min_lr_ratio: 0.1
        action_model_learning_rate: null
        action_model_weight_decay: null
        enable_gradient_checkpointing: true
        enable_mixed_precision_training: true
        mixed_precision_dtype: bfloat16
        reduce_in_full_precision: false
        repeated_diffusion_steps: 4
        deterministic: null
      checkpoint: {uri: null, save_interval: 2500, keep_last: 2, keep_every: null,
                   async_save: true, init_from: null, storage_options: {}}
      resources: {nodes: 1, gpus_per_node: 0, tasks_per_node: null, cpus_per_task: null,
                  mem_gb: null, time: "24:00:00", partition: null, account: null, qos: null,
                  constraint: null, exclude: null, nodelist: null, reservation: null,
                  gpu_request: gpus-per-node, signal_lead_s: 120, additional_parameters: {},
                  setup: [], env: {}, container: null}
      retry: {restart_on: [preemption, time_limit, node_failure, hang], max_error_restarts: 0,
              max_no_progress: 3, hang_timeout_s: 1800}
      tracking: {wandb: null, log_interval: 1, sample_ids: false}
    """)
    expected["model"]["options"] = VlaOptions().model_dump()
    expected["data"]["options"] = DATA_OPTIONS["lerobot"]().model_dump()
    assert spec.model_dump(mode="json") == expected


def test_json_and_back_is_the_same_spec() -> None:
    data = spec_with("resources.nodes", {"min": 2, "max": 4})
    data["resources"] |= {
        "gpus_per_node": "a100:4",
        "env": {"A": "010", "B": 1.5, "HF_TOKEN": None},
        "additional_parameters": {"mail_user": "x", "hold": True, "nice": 10},
        "setup": ["module load cuda"],
        "time": "1:30",
    }
    data["checkpoint"] = {"storage_options": {"client_kwargs": {"n": [1, 2.5, None, "x"]}}}
    data["tracking"] = {"wandb": {"project": "p", "mode": "offline", "tags": ["a"]}}
    data["model"] = {"kind": "my_pkg.models:build", "options": {"a": {"b": [1, 2]}}}
    spec = RunSpec.model_validate(data)
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.model_dump_json() == spec.model_dump_json()
    assert again.resources.nodes == NodeRange(min=2, max=4)
    assert again.resources.additional_parameters == {"mail-user": "x", "hold": True, "nice": "10"}
    assert again.resources.env == {"A": "010", "B": "1.5", "HF_TOKEN": None}


def test_a_spec_cannot_be_changed() -> None:
    spec = RunSpec.model_validate(MINIMAL)
    with pytest.raises(ValidationError):
        spec.train.max_steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_there_is_a_json_schema_without_loose_objects() -> None:
    schema = RunSpec.model_json_schema()
    for name, part in {"RunSpec": schema, **schema["$defs"]}.items():
        assert part["additionalProperties"] is False, name
    steps = schema["$defs"]["TrainSpec"]["properties"]["global_batch_size"]
    assert (steps["minimum"], steps["maximum"]) == (1, 2**31)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("train.max_steps", 1e4, 10000),
        ("train.max_steps", 2.0, 2),
        ("train.learning_rate", 1, 1.0),
        ("train.epochs", 0.5, 0.5),
        ("train.max_grad_norm", None, None),
        ("train.weight_decay", 0, 0.0),
        ("train.strategy", "fsdp-shard-grad-op", "fsdp-grad"),
        ("train.strategy", "shard-grad-op", "fsdp-grad"),
        ("train.strategy", "fsdp-full-shard", "fsdp-full"),
        ("train.strategy", "full-shard", "fsdp-full"),
        ("train.lr_scheduler_type", "warmup_cosine", "linear-warmup+cosine-decay"),
        ("train.lr_scheduler_type", "warmup_constant", "linear-warmup+constant"),
        ("resources.nodes", 2.0, 2),
        ("resources.time", 90, 90),
        ("resources.env", None, {}),
        ("resources.setup", None, ()),
        ("tracking.wandb", {}, None),
        ("model.kind", "a.b:c.d", "a.b:c.d"),
    ],
)
def test_accepted(path: str, value: Any, expected: Any) -> None:
    spec = RunSpec.model_validate(spec_with(path, value))
    found = value_at(spec, path)
    if path == "tracking.wandb":
        assert found.model_dump() == {
            "project": None,
            "entity": None,
            "mode": "online",
            "tags": (),
        }
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("section", ["checkpoint", "resources", "retry", "tracking"])
def test_an_empty_section_is_all_defaults(section: str) -> None:
    assert RunSpec.model_validate(spec_with(section, None)) == RunSpec.model_validate(MINIMAL)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("train.max_steps", "8", "remove the quotes"),
        ("train.max_steps", "1_000", "write 1000"),
        ("train.max_steps", "1,000", "write 1000"),
        ("train.max_steps", True, "whole number, found true"),
        ("train.max_steps", 1.5, "whole number, found 1.5"),
        ("train.max_steps", NAN, "whole number"),
        ("train.max_steps", INF, "whole number"),
        ("train.max_steps", 0, "at least 1"),
        ("train.max_steps", 10**300, "at most"),
        ("train.max_steps", [1], "found a list"),
        ("train.epochs", 0, "more than 0"),
        ("train.epochs", 1e300, "at most"),
        ("train.global_batch_size", None, "found nothing"),
        ("train.learning_rate", 0, "more than 0"),
        ("train.learning_rate", -1e-4, "more than 0"),
        ("train.learning_rate", NAN, "finite"),
        ("train.learning_rate", INF, "finite"),
        ("train.learning_rate", 10**400, "finite"),
        ("train.learning_rate", "1e-4", "remove the quotes"),
        ("train.learning_rate", "nan", 'found "nan"'),
        ("train.learning_rate", True, "found true"),
        ("train.weight_decay", -0.1, "at least 0"),
        ("train.betas", [0.9], "list of two"),
        ("train.betas", 0.9, "list of two"),
        ("train.max_grad_norm", 0, "more than 0"),
        ("train.warmup_ratio", 1.1, "at most 1"),
        ("train.warmup_ratio", -0.1, "at least 0"),
        ("train.min_lr_ratio", 2, "at most 1"),
        ("train.freeze_steps", -1, "at least 0"),
        ("train.freeze_steps", 5, "backbone-freeze-warmup"),
        ("train.replicate", 2, "fsdp"),
        ("train.strategy", "ddpp", "did you mean ddp?"),
        ("train.strategy", 3, "one of ddp, fsdp-grad, fsdp-full"),
        ("train.lr_scheduler_type", "cosine", "one of"),
        ("train.mixed_precision_dtype", "float16", "loss scaling"),
        ("train.mixed_precision_dtype", "float32", "enable_mixed_precision_training"),
        ("train.deterministic", "yes", "write true or false"),
        ("train.deterministic", 1, "true or false, found 1"),
        ("train.deterministic", "true", "write true or false"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, "at most"),
        ("seed", "0", "remove the quotes"),
        ("name", 3, "quote it"),
        ("name", True, "quote it"),
        ("name", None, "must be text"),
        ("run_root", "", "empty"),
        ("run_root", 3, "quote it"),
        ("model.kind", "vlaa", "did you mean vla?"),
        ("model.kind", "vitra-paligemma", "not yet built"),
        ("model.kind", "pkg.module", "package.module:factory"),
        ("model.kind", "pkg:", "package.module:factory"),
        ("model.kind", "pkg:a b", "package.module:factory"),
        ("data.kind", "mixture", "not yet built"),
        ("data.kind", "vitra-episodes", "not yet built"),
        ("data.num_workers", -1, "at least 0"),
        ("checkpoint.uri", "s3:/bucket/x", "write s3://"),
        ("checkpoint.uri", "file:~/x", "write file://"),
        ("checkpoint.keep_last", 0, "at least 2"),
        ("checkpoint.keep_last", None, "found nothing"),
        ("checkpoint.keep_last", 1, "at least 2"),
        ("checkpoint.keep_last", -1, "at least 2"),
        ("checkpoint.keep_every", 0, "at least 1"),
        ("checkpoint.save_interval", "auto", "whole number"),
        ("resources.nodes", True, "found true"),
        ("resources.nodes", "8", "remove the quotes"),
        ("resources.nodes", 0, "at least 1"),
        ("resources.nodes", -1, "at least 1"),
        ("resources.nodes", 65537, "at most 65536"),
        ("resources.nodes", [1, 2], "{min: 2, max: 8}"),
        ("resources.gpus_per_node", "a100", "a100:4"),
        ("resources.gpus_per_node", "a100:0", "a100:4"),
        ("resources.gpus_per_node", "gpu:a100:4", "a100:4"),
        ("resources.gpus_per_node", "4", "remove the quotes"),
        ("resources.gpus_per_node", -1, "at least 0"),
        ("resources.time", 1.5, "whole minutes"),
        ("resources.time", 60.0, "whole minutes"),
        ("resources.time", True, "whole minutes"),
        ("resources.time", 0, "no limit"),
        ("resources.time", "1:90", "has 90 for its seconds"),
        ("resources.gpu_request", "gpu-per-node", "did you mean gpus-per-node?"),
        ("resources.partition", "", "empty"),
        ("resources.setup", "a", "must be a list, found text"),
        ("resources.env", [1], "must be a mapping, found a list"),
        ("resources", 3, "must be a mapping, found a number"),
        ("tracking.wandb", True, "must be a mapping"),
        ("tracking.wandb", "some-credential", "must be a mapping, found text"),
        ("tracking.log_interval", 0, "at least 1"),
        ("retry.restart_on", "hang", "must be a list"),
        ("retry.max_no_progress", 0, "at least 1"),
        ("retry.hang_timeout_s", 0, "at least 1"),
    ],
)
def test_refused_with_the_fix(path: str, value: Any, says: str) -> None:
    found = problems(spec_with(path, value))
    assert list(found) == [path]
    assert says in found[path]


def test_one_of_steps_and_epochs_is_required() -> None:
    data = spec_with("train", {"global_batch_size": 8})
    assert "one of max_steps and epochs" in problems(data)["train.max_steps"]
    for end in ({"epochs": 1}, {"max_steps": 1}, {"epochs": 1, "max_steps": 1}):
        RunSpec.model_validate(spec_with("train", {"global_batch_size": 8, **end}))


def test_all_faults_come_at_once_rules_between_fields_included() -> None:
    found = problems(
        {
            "name": "my run",
            "model": {"kind": "vla", "options": {"dim": 65, "layer": 1}},
            "train": {"strategy": "ddp", "replicate": 2, "learning_rate": 0, "betas": [0.9, 1]},
            "resources": {
                "nodes": {"min": 3, "max": 2, "step": 1},
                "gpus_per_node": "a100:4",
                "tasks_per_node": 2,
                "mem_gb": "x",
            },
        }
    )
    assert set(found) == {
        "name",
        "model.options.heads",
        "model.options.layer",
        "data.kind",
        "train.replicate",
        "train.max_steps",
        "train.global_batch_size",
        "train.learning_rate",
        "train.betas.1",
        "resources.nodes.max",
        "resources.nodes.step",
        "resources.tasks_per_node",
        "resources.mem_gb",
    }


@pytest.mark.parametrize(
    ("resources", "tasks", "gpu_count", "gpu_type"),
    [
        ({}, 1, 0, None),
        ({"tasks_per_node": 3}, 3, 0, None),
        ({"gpus_per_node": 4}, 4, 4, None),
        ({"gpus_per_node": "a100:4"}, 4, 4, "a100"),
        ({"gpus_per_node": 2, "tasks_per_node": 2}, 2, 2, None),
    ],
)
def test_processes_per_node(
    resources: dict[str, Any], tasks: int, gpu_count: int, gpu_type: str | None
) -> None:
    found = RunSpec.model_validate(spec_with("resources", resources)).resources
    assert (found.tasks, found.gpu_count, found.gpu_type) == (tasks, gpu_count, gpu_type)


@pytest.mark.parametrize(("gpus", "tasks"), [(2, 1), ("a100:2", 4)])
def test_one_process_drives_one_gpu(gpus: int | str, tasks: int) -> None:
    data = spec_with("resources", {"gpus_per_node": gpus, "tasks_per_node": tasks})
    assert "one process drives one GPU; write 2" in problems(data)["resources.tasks_per_node"]


def test_resource_properties() -> None:
    plain = RunSpec.model_validate(MINIMAL).resources
    assert (plain.threads, plain.time_limit_min, list(plain.node_counts)) == (1, 1440, [1])
    assert not plain.elastic
    data = spec_with(
        "resources", {"nodes": {"min": 2, "max": 4}, "cpus_per_task": 3, "time": "1:30"}
    )
    some = RunSpec.model_validate(data).resources
    assert (some.threads, some.time_limit_min, list(some.node_counts)) == (3, 2, [2, 3, 4])
    assert some.elastic


@pytest.mark.parametrize("name", ["q", "a.b-c_d", "0", "x" * 64, "null", "A1"])
def test_good_names(name: str) -> None:
    assert RunSpec.model_validate(spec_with("name", name)).name == name


@pytest.mark.parametrize(
    "name",
    [
        "my run",
        "it's",
        "a%jb",
        "a$HOME",
        "a`id`b",
        'a"=0"',
        "täst",
        "日本",
        "q" * 65,
        "q" * 300,
        "x\n#SBATCH --time=1",
        "x\n",
        "../up",
        "-J",
        ".",
        "..",
        "_x",
        "",
        "a/b",
    ],
)
def test_bad_names(name: str) -> None:
    message = problems(spec_with("name", name))["name"]
    assert "\n" not in message
    assert len(message) < 250


# Every text of the spec, with a spec around it in which it may stand.
TEXT_FIELDS = [
    "name",
    "run_root",
    "model.kind",
    "data.kind",
    "data.options.root",
    "data.options.image_key",
    "data.options.action_key",
    "train.strategy",
    "train.lr_scheduler_type",
    "train.mixed_precision_dtype",
    "checkpoint.uri",
    "checkpoint.init_from",
    "checkpoint.storage_options.endpoint",
    "resources.gpus_per_node",
    "resources.time",
    "resources.partition",
    "resources.account",
    "resources.qos",
    "resources.constraint",
    "resources.exclude",
    "resources.nodelist",
    "resources.reservation",
    "resources.gpu_request",
    "resources.additional_parameters.mail-user",
    "resources.env.FOO",
    "tracking.wandb.project",
    "tracking.wandb.entity",
    "tracking.wandb.mode",
]


CONTROL = ["\n", "\t", "\x00", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u2029", "\ud800"]


@pytest.mark.parametrize("path", TEXT_FIELDS)
def test_control_characters_are_refused_everywhere(path: str) -> None:
    for bad in CONTROL:
        found = problems(spec_with(path, f"a{bad}b"))
        assert list(found) == [path]
        assert found[path].isprintable()


@pytest.mark.parametrize("bad", ["a\nb", "a\tb", "a\n", "\x1b"])
def test_control_characters_in_lists_names_and_free_data(bad: str) -> None:
    own = {"kind": "m:f", "options": {"deep": [{"x": bad}]}}
    assert list(problems(spec_with("model", own))) == ["model.options.deep.0.x"]
    assert list(problems(spec_with("resources.setup", ["ok", bad]))) == ["resources.setup.1"]
    wandb = {"tags": [bad]}
    assert list(problems(spec_with("tracking.wandb", wandb))) == ["tracking.wandb.tags.0"]
    for path in ("resources.env", "resources.additional_parameters", "checkpoint.storage_options"):
        assert len(problems(spec_with(path, {bad: "x"}))) == 1


MARKER = "hunter2Marker"


URLS = [
    f"s3://AKIA:{MARKER}@bucket/x",
    f"s3://AKIA:{MARKER}/with+slash@bucket",
    f"https://{MARKER}@host",
    f"git clone https://u:{MARKER}@host/x",
    f"simplecache::s3://k:{MARKER}@b",
]


@pytest.mark.parametrize("path", TEXT_FIELDS)
def test_user_info_in_a_url_is_refused_and_never_shown(path: str) -> None:
    for url in URLS:
        found = problems(spec_with(path, url))
        assert list(found) == [path]
        assert MARKER not in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/prefix",
        "s3://bucket/a@b",
        "http://host:9000/a@b",
        "http://[::1]:9000/x",
        "user@host:/path",
        "mail me@x.org",
        "a://b c@d",
    ],
)
def test_what_is_no_user_info(text: str) -> None:
    assert not has_user_info(text)


@pytest.mark.parametrize("piece", ["a", "a://", "a://b:c", "a://b:1", "@", "a://b@", "b:"])
def test_the_search_for_user_info_takes_linear_time(piece: str) -> None:
    before = time.process_time()
    has_user_info(f"a://{piece * 100_000}")
    has_user_info(f"{piece * 100_000} @")
    assert time.process_time() - before < 2  # a quadratic search takes minutes


def test_texts_have_a_longest_length() -> None:
    assert "longer than 65536" in problems(spec_with("run_root", "x" * 65537))["run_root"]
    name = "x" * 65537
    assert list(problems(spec_with("resources.env", {name: "1"}))) == [f"resources.env.{name}"]


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "api_key",
        "apiKey",
        "apikey",
        "APIKey",
        "HF_TOKEN",
        "token",
        "session-token",
        "PASSWD",
        "password",
        "dbPassword",
        "MYSQLPASSWORD",
        "client_secret",
        "key",
        "KEY2",
        "secrets",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MAX_TOKENS",
        "MONKEY",
        "NCCL_DEBUG",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "PWD",
        "keys_per_node",
        "anon",
        "Secretary",
        "",
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize("value", [MARKER, "", 3, {"a": MARKER}, [MARKER]])
def test_literal_secrets_are_refused_and_never_shown(value: Any) -> None:
    for path in (
        "resources.env.HF_TOKEN",
        "checkpoint.storage_options.secret",
        "checkpoint.storage_options.client_kwargs.aws_secret_access_key",
        "resources.additional_parameters.api_key",
    ):
        found = problems(spec_with(path, value))
        assert list(found) == [path]
        assert "secret" in found[path]
        assert MARKER not in str(found)
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(spec_with("resources.env.HF_TOKEN", value))
    assert MARKER not in str(caught.value)


def test_null_passes_a_secret_through_unrecorded() -> None:
    spec = RunSpec.model_validate(spec_with("resources.env", {"HF_TOKEN": None}))
    assert spec.resources.env == {"HF_TOKEN": None}
    RunSpec.model_validate(spec_with("checkpoint.storage_options", {"key": None, "anon": True}))


@pytest.mark.parametrize(
    ("env", "says"),
    [
        *(({name: "1"}, "set by vitra") for name in LAUNCH_VARIABLES),
        ({"RANK": None}, "set by vitra"),
        ({"1A": "x"}, "no name of a variable"),
        ({"A-B": "x"}, "no name of a variable"),
        ({"": "x"}, "no name of a variable"),
        ({"Ä": "x"}, "no name of a variable"),
        ({"A=B": "x"}, "no name of a variable"),
        ({"A": True}, "quote it"),
        ({"A": [1]}, "must be text"),
        ({"A": NAN}, "finite"),
    ],
)
def test_bad_environment(env: dict[str, Any], says: str) -> None:
    (message,) = problems(spec_with("resources.env", env)).values()
    assert says in message


@pytest.mark.parametrize("name", sorted(REFUSED_SBATCH_OPTIONS))
def test_sbatch_options_of_our_own_are_refused(name: str) -> None:
    for written in (name, name.replace("-", "_"), f"--{name}"):
        path = "resources.additional_parameters"
        assert list(problems(spec_with(path, {written: "x"}))) == [f"{path}.{written}"]


@pytest.mark.parametrize(
    "name",
    ["outp", "o", "J", "err", "no", "no-req", "gpu", "ntask", "exp", "wra", "tim", "sig", "arr"],
)
def test_beginnings_that_sbatch_would_complete_are_refused(name: str) -> None:
    assert sbatch_option_problem(name)


@pytest.mark.parametrize(
    "name",
    [
        "mail-user",
        "hold",
        "time-min",
        "gres-flags",
        "mem-bind",
        "mem-per-cpu",
        "exclusive",
        "wait-all-nodes",
        "dependency",
        "begin",
        "licenses",
        "gpu-bind",
        "no-kill",
    ],
)
def test_other_sbatch_options_pass(name: str) -> None:
    assert sbatch_option_problem(name) is None


@pytest.mark.parametrize("name", ["OUTPUT", "a b", "x;y", "ä", "a=b", "", "a--b", "-", "a\n"])
def test_what_is_no_option_at_all_is_refused(name: str) -> None:
    assert problems(spec_with("resources.additional_parameters", {name: "x"}))


def test_values_of_sbatch_options() -> None:
    given = {"hold": True, "exclusive": "", "nice": 10, "begin": "16:00", "mail_user": "x"}
    spec = RunSpec.model_validate(spec_with("resources.additional_parameters", given))
    assert spec.resources.additional_parameters == {
        "hold": True,
        "exclusive": True,
        "nice": "10",
        "begin": "16:00",
        "mail-user": "x",
    }
    for value, says in ((False, "leave it out"), (None, "leave it out"), ([1], "must be text")):
        data = spec_with("resources.additional_parameters", {"hold": value})
        assert says in problems(data)["resources.additional_parameters.hold"]
    twice = spec_with("resources.additional_parameters", {"mail_user": "x", "mail-user": "y"})
    assert "second time" in problems(twice)["resources.additional_parameters.mail-user"]


def test_options_of_built_ins_are_checked_and_filled_in() -> None:
    spec = RunSpec.model_validate(spec_with("model.options", {"dim": 64, "heads": 2}))
    assert VlaOptions.model_validate(spec.model.options) == VlaOptions(dim=64, heads=2)
    assert spec.model.options["sampling_steps"] == 10
    for path, value in (
        ("model.options.dim", "64"),
        ("model.options.dropout", 1),
        ("model.options.sampling_steps", 101),
        ("data.options.chunk", 0),
        ("data.options.root", 3),
    ):
        assert list(problems(spec_with(path, value))) == [path]
    synthetic = {"kind": "synthetic", "options": {"mask": "no"}}
    assert list(problems(spec_with("data", synthetic))) == ["data.options.mask"]


def test_options_of_own_components_are_theirs() -> None:
    options = {"anything": [1, {"x": None}], "api_key_file": "/x"}
    data = spec_with("data", {"kind": "pkg:make", "options": options})
    assert RunSpec.model_validate(data).data.options == options
    data = spec_with("data", {"kind": "pkg:make", "options": {"a": [NAN]}})
    assert "finite" in problems(data)["data.options.a.0"]
    data = spec_with("data", {"kind": "pkg:make", "options": {"a": Path("x")}})
    assert "must be text" in problems(data)["data.options.a"]


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_of(part)


def places_in(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every model in the spec and its place."""
    yield path, model
    for name, info in model.model_fields.items():
        for part in models_of(info.annotation):
            yield from places_in(part, (*path, name))


PLACES = list(places_in(RunSpec))
MODEL_PLACES = [*(place for place, _ in PLACES), ("model", "options"), ("data", "options")]


def test_the_walk_finds_every_level() -> None:
    assert ("resources", "nodes") in MODEL_PLACES
    assert ("tracking", "wandb") in MODEL_PLACES
    assert ("resources", "container") in MODEL_PLACES
    assert len(MODEL_PLACES) == 13


@pytest.mark.parametrize("place", MODEL_PLACES, ids=".".join)
@pytest.mark.parametrize("kinds", [("vla", "lerobot"), ("vla", "synthetic")])
def test_an_unknown_key_is_refused_at_every_level(
    place: tuple[str, ...], kinds: tuple[str, str]
) -> None:
    container = {"runtime": "none", "image": "i"}
    data = spec_with("resources", {"nodes": {"min": 1, "max": 2}, "container": container})
    data["tracking"] = {"wandb": {}}
    data["model"]["kind"], data["data"]["kind"] = kinds
    inner = data
    for part in place:
        inner = inner.setdefault(part, {})
    inner["zz_unknown"] = 1
    assert list(problems(data)) == [".".join((*place, "zz_unknown"))]


def test_every_built_in_has_its_options() -> None:
    assert set(MODEL_OPTIONS) == {"vla"}
    assert set(DATA_OPTIONS) == {"lerobot", "synthetic"}
    for options in (*MODEL_OPTIONS.values(), *DATA_OPTIONS.values()):
        assert options.model_validate(options().model_dump()) == options()


# Values of every shape; none may reach pydantic's own words, whatever the field.
SHAPES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    NAN,
    10**400,
    "",
    "text",
    [],
    [[]],
    {},
    {"a": {}},
    (1,),
]


FIELDS = [".".join((*place, name)) for place, model in PLACES for name in model.model_fields]


@pytest.mark.parametrize("path", FIELDS)
def test_no_shape_of_value_reaches_pydantics_own_words(path: str) -> None:
    for value in SHAPES:
        data = spec_with("resources", {"nodes": {"min": 1, "max": 2}})
        *above, key = path.split(".")
        inner = data
        for part in above:
            inner = inner.setdefault(part, {})
        inner[key] = value
        try:
            spec = RunSpec.model_validate(data)
        except ValidationError as err:
            for detail in err.errors():
                assert detail["type"] in ("refused", "missing", "extra_forbidden"), (value, detail)
                assert "\n" not in detail["msg"]
        else:
            assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
