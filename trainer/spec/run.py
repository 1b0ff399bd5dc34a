"""The run spec: what a user asks for, with every default filled in.

The models are immutable and refuse unknown keys at every level. A spec that exists is sound: what
can be checked without looking at the machine, the cluster or the data has been checked. Where a
rule joins two fields it is checked with the later one, so that one reading finds all faults.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainer.spec.container import ContainerSpec
from trainer.spec.fields import (
    LARGEST_COUNT,
    SECRET,
    Choice,
    Count,
    CountOrZero,
    Flag,
    Fraction,
    Listed,
    Loc,
    Mapped,
    NotNegative,
    Positive,
    Real,
    Share,
    SpecModel,
    Text,
    Whole,
    check_any_text,
    check_text,
    close_match,
    data_faults,
    items_of,
    refusal,
    refuse_all,
)
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.safety import looks_secret, sbatch_option_problem, text_problem
from trainer.spec.times import parse_slurm_time

MOST_NODES = 65536
MOST_PER_NODE = 65536
#: sbatch --signal takes at most this many seconds.
LONGEST_SIGNAL_LEAD_S = 65535

Strategy = Literal["ddp", "fsdp-grad", "fsdp-full"]
Schedule = Literal[
    "linear-warmup+cosine-decay", "linear-warmup+constant", "constant", "backbone-freeze-warmup"
]
GpuRequest = Literal["gpus-per-node", "gres", "none"]
WandbMode = Literal["online", "offline", "disabled"]
RestartCause = Literal["preemption", "time_limit", "node_failure", "hang", "error", "out_of_memory"]

#: What VITRA's configurations call the strategies.
STRATEGY_ALIASES = {
    "fsdp-shard-grad-op": "fsdp-grad",
    "shard-grad-op": "fsdp-grad",
    "fsdp-full-shard": "fsdp-full",
    "full-shard": "fsdp-full",
}
SCHEDULE_ALIASES = {
    "warmup_cosine": "linear-warmup+cosine-decay",
    "warmup_constant": "linear-warmup+constant",
}
_STRATEGY = Choice(get_args(Strategy), STRATEGY_ALIASES)
_SCHEDULE = Choice(get_args(Schedule), SCHEDULE_ALIASES)

#: Components that are announced, and not built yet.
LATER_KINDS = {"model": ("vitra-paligemma",), "data": ("vitra-episodes", "mixture")}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
_OWN_KIND = re.compile(rf"{_DOTTED}:{_DOTTED}")
# "s3:/bucket": a directory called "s3:" would be made, and nobody would find the checkpoints.
_HALF_A_URL = r"(file|local|s3a?|gs|gcs|az|abfs|https?|hdfs):(?!//)"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_TYPED_GPUS = r"([A-Za-z0-9][A-Za-z0-9_.-]*):([0-9]{1,5})"


def _check_name(value: object) -> str:
    text = check_any_text(value)
    if not _NAME.fullmatch(text):
        raise refusal(
            "must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a "
            "letter or digit, found {found}",
            text,
        )
    return text


def _check_kind(value: object, section: str, built_in: Sequence[str]) -> str:
    text = check_text(value)
    if text in built_in or _OWN_KIND.fullmatch(text):
        return text
    if text in LATER_KINDS[section]:
        raise refusal(f"{text} is not yet built; use {' or '.join(built_in)}")
    near = close_match(text, built_in)
    raise refusal(
        f"must be {', '.join(built_in)} or package.module:factory, found {{found}}"
        + (f"; did you mean {near}?" if near else ""),
        text,
    )


def _check_options(
    value: dict[str, Any], kind: str | None, built_in: Mapping[str, type[SpecModel]]
) -> dict[str, Any]:
    """Options of a built-in component with its defaults filled in; those of others as they are."""
    model = built_in.get(kind) if kind else None
    if model is not None:
        return model.model_validate(value).model_dump()
    refuse_all(data_faults(value, secrets=False))
    return value


class ModelSpec(SpecModel):
    """The model: a built-in name or `package.module:factory`, and its options."""

    kind: str
    options: Annotated[dict[str, Any], Mapped] = Field(
        default_factory=dict[str, Any], validate_default=True
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _known(cls, value: object) -> str:
        return _check_kind(value, "model", tuple(MODEL_OPTIONS))

    @field_validator("options")
    @classmethod
    def _checked(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _check_options(value, info.data.get("kind"), MODEL_OPTIONS)


class DataSpec(SpecModel):
    """The training data: a built-in name or `package.module:factory`, its options, its workers."""

    kind: str
    options: Annotated[dict[str, Any], Mapped] = Field(
        default_factory=dict[str, Any], validate_default=True
    )
    num_workers: Annotated[int, Whole(0, 1024)] = 2
    prefetch_factor: Annotated[int, Whole(1, 1024)] = 2

    @field_validator("kind", mode="before")
    @classmethod
    def _known(cls, value: object) -> str:
        return _check_kind(value, "data", tuple(DATA_OPTIONS))

    @field_validator("options")
    @classmethod
    def _checked(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _check_options(value, info.data.get("kind"), DATA_OPTIONS)


def _check_betas(value: object) -> object:
    pair = items_of(value)
    if pair is None or len(pair) != 2:
        raise refusal("must be a list of two numbers, such as [0.9, 0.95], found {found}", value)
    return pair


def _check_precision(value: object) -> str:
    if value == "float16":
        raise refusal("float16 needs loss scaling, which the trainer has not; use bfloat16")
    if value == "float32":
        raise refusal("is bfloat16; for float32 set train.enable_mixed_precision_training to false")
    return Choice(("bfloat16",)).check(value)


class TrainSpec(SpecModel):
    """How to train. All step counts are optimizer steps; learning rates are peaks."""

    strategy: Annotated[Strategy, _STRATEGY] = "ddp"
    replicate: Count = 1
    epochs: Annotated[float, Real(more_than=0, at_most=LARGEST_COUNT)] | None = None
    max_steps: Count | None = Field(default=None, validate_default=True)
    global_batch_size: Count
    per_device_batch_size: Count | None = None
    max_per_device_batch_size: Count | None = None
    learning_rate: Positive = 1e-4
    weight_decay: NotNegative = 0.1
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_check_betas)] = (0.9, 0.95)
    max_grad_norm: Positive | None = 1.0
    lr_scheduler_type: Annotated[Schedule, _SCHEDULE] = "linear-warmup+cosine-decay"
    warmup_ratio: Share = 0.03
    freeze_steps: CountOrZero = 0
    min_lr_ratio: Share = 0.1
    action_model_learning_rate: Positive | None = None
    action_model_weight_decay: NotNegative | None = None
    enable_gradient_checkpointing: Flag = True
    enable_mixed_precision_training: Flag = True
    mixed_precision_dtype: Annotated[Literal["bfloat16"], BeforeValidator(_check_precision)] = (
        "bfloat16"
    )
    reduce_in_full_precision: Flag = False
    repeated_diffusion_steps: Count = 4
    deterministic: Flag | None = None

    @field_validator("replicate")
    @classmethod
    def _replicas_are_sharded(cls, replicate: int, info: ValidationInfo) -> int:
        if replicate > 1 and info.data.get("strategy") == "ddp":
            raise refusal(
                "is {found}, but ddp replicates everything already; write 1, or set "
                "train.strategy to fsdp-grad or fsdp-full",
                replicate,
            )
        return replicate

    @field_validator("max_steps")
    @classmethod
    def _has_an_end(cls, max_steps: int | None, info: ValidationInfo) -> int | None:
        if max_steps is None and info.data.get("epochs", 0) is None:
            raise refusal("one of max_steps and epochs is required: how long to train")
        return max_steps

    @field_validator("freeze_steps")
    @classmethod
    def _freezes_by_schedule(cls, freeze_steps: int, info: ValidationInfo) -> int:
        schedule = info.data.get("lr_scheduler_type", "backbone-freeze-warmup")
        if freeze_steps and schedule != "backbone-freeze-warmup":
            raise refusal(
                f"is {{found}}, but {schedule} freezes nothing; write 0, or set "
                "train.lr_scheduler_type to backbone-freeze-warmup",
                freeze_steps,
            )
        return freeze_steps


def is_sharded(strategy: str) -> bool:
    """Whether it takes its model on the meta device, and each rank fills a part of it."""
    return strategy != "ddp"


def _check_storage_options(value: dict[str, Any]) -> dict[str, Any]:
    refuse_all(data_faults(value, secrets=True))
    return value


def _check_uri(value: object) -> str:
    text = check_text(value)
    if half := re.match(_HALF_A_URL, text):
        raise refusal(f"is neither a path nor a URL, found {{found}}; write {half[1]}://", text)
    return text


class CheckpointSpec(SpecModel):
    """Where checkpoints go, how often they are made and which are kept.

    `save_interval` and `keep_every` count optimizer steps. In `uri`, `{name}` and `{run_id}` stand
    for the run's; the planner fills them in.
    """

    uri: Annotated[str, BeforeValidator(_check_uri)] | None = None
    save_interval: Count = 2500
    keep_last: Annotated[int, Whole(at_least=2)] = 2
    keep_every: Count | None = None
    async_save: Flag = True
    init_from: Text | None = None
    storage_options: Annotated[dict[str, Any], AfterValidator(_check_storage_options), Mapped] = (
        Field(default_factory=dict[str, Any])
    )


class NodeRange(SpecModel):
    """The node counts that an elastic run may use, both ends included."""

    min: Annotated[int, Whole(at_most=MOST_NODES)]
    max: Annotated[int, Whole(at_most=MOST_NODES)]

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min")
        if least is not None and most < least:
            raise refusal(f"must be at least min, which is {least}, found {{found}}", most)
        return most


def _check_nodes(value: object) -> object:
    if isinstance(value, NodeRange):
        return value
    if isinstance(value, Mapping):
        return NodeRange.model_validate(value)
    if not isinstance(value, (int, float, str)):
        raise refusal("must be a whole number, or {min: 2, max: 8}, found {found}", value)
    return Whole(at_most=MOST_NODES).check(value)


def _check_gpus(value: object) -> object:
    if not isinstance(value, str) or value.isdecimal():
        return Whole(0, MOST_PER_NODE).check(value)
    match = re.fullmatch(_TYPED_GPUS, check_text(value))
    if match is None or not 1 <= int(match[2]) <= MOST_PER_NODE:
        raise refusal("must be a number, or type:number such as a100:4, found {found}", value)
    return value


def _check_time(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise refusal(
            "must be whole minutes, or a time as Slurm writes it such as 24:00:00, found {found}",
            value,
        )
    if isinstance(value, str):
        check_any_text(value)
    try:
        parse_slurm_time(value)
    except ValueError as err:
        raise refusal(f"{{found}} {err}", value) from err
    return value


def _check_parameters(value: dict[str, Any]) -> dict[str, str | bool]:
    """sbatch options by their names there (dashes); True is an option without a value."""
    faults: list[tuple[Loc, PydanticCustomError]] = []
    checked: dict[str, str | bool] = {}
    for key, item in value.items():
        name = key.replace("_", "-")
        if problem := text_problem(key) or sbatch_option_problem(name):
            faults.append(((key,), refusal(problem, at_key=True)))
        elif name in checked:
            faults.append(((key,), refusal(f"sets {name} a second time; keep one", at_key=True)))
        elif looks_secret(key) and item is not None:
            faults.append(((key,), refusal(SECRET, at_key=True)))
        elif item is True or item == "":
            checked[name] = True
        elif item is False or item is None:
            problem = "is {found}; write true for an option without a value, or leave it out"
            faults.append(((key,), refusal(problem, item)))
        elif isinstance(item, (str, int, float)):
            wrong = list(data_faults(item, (key,), secrets=True))
            faults.extend(wrong)
            if not wrong:
                checked[name] = str(item)
        else:
            faults.append(((key,), refusal("must be text, a number or true, found {found}", item)))
    refuse_all(faults)
    return checked


def _env_text(value: object) -> str:
    """A variable's value; a number is text to every program, so it may go unquoted."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for _, error in data_faults(value, secrets=False):
            raise error
        return str(value)
    return check_any_text(value)


def _check_env(value: dict[str, Any]) -> dict[str, str | None]:
    """Variables by name; None passes the submitter's value through."""
    faults: list[tuple[Loc, PydanticCustomError]] = []
    checked: dict[str, str | None] = {}
    for name, item in value.items():
        problem = text_problem(name)
        if not re.fullmatch(_VARIABLE, name):
            problem = "is no name of a variable: letters, digits, underscores, no digit first"
        elif name in LAUNCH_VARIABLES:
            problem = "is set by vitra in every process, and may not be set here"
        elif looks_secret(name) and item is not None:
            problem = (
                f"looks like a secret, and a spec holds none; write {name}: null to pass the "
                "value of the shell that submits"
            )
        if problem:
            faults.append(((name,), refusal(problem, at_key=True)))
            continue
        try:
            checked[name] = None if item is None else _env_text(item)
        except PydanticCustomError as err:
            faults.append(((name,), err))
    refuse_all(faults)
    return checked


class ResourcesSpec(SpecModel):
    """What to ask the cluster for. Where a field is None nothing is asked.

    `mem_gb` is per node; 0 is all of a node's memory, as in Slurm. `gpus_per_node` is a count, or
    "type:count". `env` maps a variable to its text, or to None to pass the submitter's value.
    """

    nodes: Annotated[int | NodeRange, BeforeValidator(_check_nodes)] = 1
    gpus_per_node: Annotated[int | str, BeforeValidator(_check_gpus)] = 0
    tasks_per_node: Annotated[int, Whole(at_most=MOST_PER_NODE)] | None = None
    cpus_per_task: Annotated[int, Whole(at_most=MOST_PER_NODE)] | None = None
    mem_gb: CountOrZero | None = None
    time: Annotated[int | str, BeforeValidator(_check_time)] = "24:00:00"
    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    constraint: Text | None = None
    exclude: Text | None = None
    nodelist: Text | None = None
    reservation: Text | None = None
    gpu_request: Annotated[GpuRequest, Choice(get_args(GpuRequest))] = "gpus-per-node"
    signal_lead_s: Annotated[int, Whole(at_most=LONGEST_SIGNAL_LEAD_S)] = 120
    additional_parameters: Annotated[
        dict[str, str | bool], BeforeValidator(_check_parameters), Mapped
    ] = Field(default_factory=dict[str, str | bool])
    setup: Annotated[tuple[Text, ...], Listed] = ()
    env: Annotated[dict[str, str | None], BeforeValidator(_check_env), Mapped] = Field(
        default_factory=dict[str, str | None]
    )
    container: Annotated[ContainerSpec, Mapped] | None = None

    @field_validator("tasks_per_node")
    @classmethod
    def _one_process_per_gpu(cls, tasks: int | None, info: ValidationInfo) -> int | None:
        gpus = info.data.get("gpus_per_node", 0)
        count = gpus if isinstance(gpus, int) else _typed_gpus(gpus)[1]
        if tasks is not None and count > 0 and tasks != count:
            raise refusal(
                f"is {{found}}, but gpus_per_node is {gpus} and one process drives one GPU; write "
                f"{count}, or leave it out",
                tasks,
            )
        return tasks

    @property
    def gpu_count(self) -> int:
        """GPUs per node; 0 for a run on CPUs."""
        gpus = self.gpus_per_node
        return gpus if isinstance(gpus, int) else _typed_gpus(gpus)[1]

    @property
    def gpu_type(self) -> str | None:
        """The kind of GPU asked for, such as "a100"."""
        gpus = self.gpus_per_node
        return None if isinstance(gpus, int) else _typed_gpus(gpus)[0]

    @property
    def tasks(self) -> int:
        """Processes per node."""
        return self.tasks_per_node or self.gpu_count or 1

    @property
    def threads(self) -> int:
        """CPU threads per process."""
        return self.cpus_per_task or 1

    @property
    def time_limit_min(self) -> int:
        """The time limit in minutes, as Slurm will count it."""
        return parse_slurm_time(self.time).minutes

    @property
    def node_counts(self) -> range:
        """The node counts that the run may have: one, or several for an elastic run."""
        nodes = self.nodes
        if isinstance(nodes, NodeRange):
            return range(nodes.min, nodes.max + 1)
        return range(nodes, nodes + 1)

    @property
    def elastic(self) -> bool:
        """True where the number of nodes may differ from attempt to attempt."""
        return isinstance(self.nodes, NodeRange)


def _typed_gpus(text: str) -> tuple[str, int]:
    kind, _, count = text.rpartition(":")
    return kind, int(count)


class RetrySpec(SpecModel):
    """When a run starts again by itself, and when it gives up."""

    restart_on: Annotated[
        tuple[Annotated[RestartCause, Choice(get_args(RestartCause))], ...], Listed
    ] = ("preemption", "time_limit", "node_failure", "hang")
    max_error_restarts: CountOrZero = 0
    max_no_progress: Count = 3
    hang_timeout_s: Count = 1800


class WandbSpec(SpecModel):
    """Weights & Biases; None for project or entity: its own default."""

    project: Text | None = None
    entity: Text | None = None
    mode: Annotated[WandbMode, Choice(get_args(WandbMode))] = "online"
    tags: Annotated[tuple[Text, ...], Listed] = ()


class TrackingSpec(SpecModel):
    """What is recorded. `log_interval` counts optimizer steps."""

    wandb: Annotated[WandbSpec, Mapped] | None = None
    log_interval: Count = 1
    sample_ids: Flag = False


_SECTIONS = ("model", "data", "train", "checkpoint", "resources", "retry", "tracking")


class RunSpec(SpecModel):
    """Everything a user says about a run."""

    name: Annotated[str, BeforeValidator(_check_name)]
    seed: Annotated[int, Whole(0, 2**63 - 1)] = 42
    run_root: Text | None = None
    model: Annotated[ModelSpec, Mapped]
    data: Annotated[DataSpec, Mapped]
    train: Annotated[TrainSpec, Mapped]
    checkpoint: Annotated[CheckpointSpec, Mapped] = Field(default_factory=CheckpointSpec)
    resources: Annotated[ResourcesSpec, Mapped] = Field(default_factory=ResourcesSpec)
    retry: Annotated[RetrySpec, Mapped] = Field(default_factory=RetrySpec)
    tracking: Annotated[TrackingSpec, Mapped] = Field(default_factory=TrackingSpec)

    @model_validator(mode="before")
    @classmethod
    def _sections_exist(cls, value: object) -> object:
        """A missing section is an empty one, so that what it lacks is named field by field."""
        if isinstance(value, Mapping):
            return {**dict.fromkeys(_SECTIONS), **cast("Mapping[str, object]", value)}
        return value
