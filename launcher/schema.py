"""The JSON Schema of a run spec, by which editors complete, explain and check one as it is typed.

It is made from the models themselves. What joins two fields, or needs a parser, stays with
`vitra plan`: a spec that the schema refuses is never sound, one that it lets pass may not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from trainer.spec.fields import SpecModel
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.run import RunSpec

Schema = dict[str, Any]

#: What an editor says of each key.
DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "name": "What the run is called: 1 to 64 letters, digits, dots, dashes and underscores.",
        "seed": "The same seed gives the same run, bit for bit on the same topology.",
        "run_root": "A directory that all nodes see; runs are made under it. Unset: "
        "$VITRA_RUN_ROOT, or ./runs.",
        "model": "The model and its options.",
        "model.kind": "A built-in name, or package.module:factory for a model of your own.",
        "model.options": "What the model takes; known for the built-in ones.",
        "data": "The training data, and how it is loaded.",
        "data.kind": "A built-in name, or package.module:factory for a data set of your own.",
        "data.options": "What the data set takes; known for the built-in ones.",
        "data.num_workers": "Processes that load data, for each rank. 0: the rank does it itself.",
        "data.prefetch_factor": "Batches that each worker prepares ahead.",
        "train": "How to train. All step counts are optimizer steps.",
        "train.strategy": "ddp: every rank holds everything. fsdp-grad: gradients and optimizer "
        "state are sharded. fsdp-full: parameters too.",
        "train.replicate": "Replica groups of a sharded run (hybrid sharding); must divide the "
        "world size.",
        "train.epochs": "How often to go through the data; max_steps decides where it is set.",
        "train.max_steps": "Optimizer steps in all.",
        "train.global_batch_size": "Samples in each optimizer step, over all ranks: exactly "
        "per_device_batch_size x world size x accumulation.",
        "train.per_device_batch_size": "Samples that a device works on at once. Unset: the largest "
        "that fits the equation.",
        "train.max_per_device_batch_size": "The most that the planner may choose for "
        "per_device_batch_size.",
        "train.learning_rate": "The peak of the schedule.",
        "train.weight_decay": "AdamW's; matrices decay, biases and norms do not.",
        "train.betas": "AdamW's two decay rates.",
        "train.max_grad_norm": "Gradients are clipped to this norm. null: no clipping.",
        "train.lr_scheduler_type": "How the learning rate goes over the steps.",
        "train.warmup_ratio": "The share of all steps in which the learning rate rises to its "
        "peak.",
        "train.freeze_steps": "Steps for which backbone-freeze-warmup keeps the backbone frozen.",
        "train.min_lr_ratio": "Where the cosine ends, as a share of the peak.",
        "train.action_model_learning_rate": "The action model's own peak. Unset: learning_rate.",
        "train.action_model_weight_decay": "The action model's own. Unset: weight_decay.",
        "train.enable_gradient_checkpointing": "Recompute activations: less memory, more time.",
        "train.enable_mixed_precision_training": "Compute in mixed_precision_dtype; weights stay "
        "in float32.",
        "train.mixed_precision_dtype": "What mixed precision computes in.",
        "train.reduce_in_full_precision": "Add gradients up over ranks in float32.",
        "train.repeated_diffusion_steps": "Noises that the action head learns from for each look "
        "at a sample.",
        "train.deterministic": "true: bit-equal results on CUDA, slower. Unset: true on the CPU.",
        "checkpoint": "Where checkpoints go, how often, and which are kept.",
        "checkpoint.uri": "A path, or a URL such as s3://bucket/prefix; {name} and {run_id} are "
        "filled in. Unset: in the run directory.",
        "checkpoint.save_interval": "Optimizer steps between two checkpoints. A kill loses the "
        "steps since the last complete one.",
        "checkpoint.keep_last": "How many of the newest are kept, at least 2.",
        "checkpoint.keep_every": "Also keep each step that this divides.",
        "checkpoint.async_save": "Write in the background while training goes on.",
        "checkpoint.init_from": "Weights to start from, a path or URL: the directory of one "
        "checkpoint, a safetensors file or a weights.pt. Used only while the run has no checkpoint "
        "of its own.",
        "checkpoint.storage_options": "Passed to fsspec. No secrets: those come from the "
        "environment.",
        "resources": "What to ask the cluster for. What is unset is not asked for.",
        "resources.nodes": "A number, or {min: 2, max: 8} for an elastic run.",
        "resources.nodes.min": "The fewest nodes that will do.",
        "resources.nodes.max": "The most nodes that can be used.",
        "resources.gpus_per_node": "A number, or type:number such as a100:4. 0: processes on the "
        "CPU.",
        "resources.tasks_per_node": "Processes on each node. Unset: one for each GPU, or 1.",
        "resources.cpus_per_task": "Processor cores for each process; a CPU run uses exactly as "
        "many threads.",
        "resources.mem_gb": "Memory of each node, in GB. 0: all of it.",
        "resources.time": "The time limit, as Slurm writes it (24:00:00), or in minutes.",
        "resources.partition": "Slurm's partition.",
        "resources.account": "The account that is charged.",
        "resources.qos": "Slurm's quality of service.",
        "resources.constraint": "Features that the nodes must have.",
        "resources.exclude": "Nodes to stay away from.",
        "resources.nodelist": "Nodes to be on.",
        "resources.reservation": "A reservation to run in.",
        "resources.gpu_request": "How this cluster wants GPUs asked for: --gpus-per-node, "
        "--gres, or not at all.",
        "resources.signal_lead_s": "Seconds before the time limit at which the run saves and "
        "leaves.",
        "resources.additional_parameters": "Other sbatch options by name; true for one without a "
        "value.",
        "resources.setup": "Shell lines run on the batch node before the job.",
        "resources.env": "Variables for every process. NAME: null passes your shell's value "
        "through, unrecorded.",
        "resources.container": "An image that every process runs in, on Slurm; null: none.",
        "resources.container.runtime": "What runs containers on this cluster. none: nothing does, "
        "whatever the rest says.",
        "resources.container.image": "pyxis: registry#name:tag, or a squash file. apptainer: a "
        "file, or a URL such as docker://name:tag. charliecloud: a directory.",
        "resources.container.mounts": "What else of the host the processes see, as SRC:DST or "
        "SRC:DST:ro. The run root, the checkpoint place, the working directory and the data are "
        "there by themselves.",
        "retry": "When the run starts again by itself, and when it gives up.",
        "retry.restart_on": "What the run starts again after.",
        "retry.max_error_restarts": "Restarts after the program's own error, where restart_on has "
        "error or out_of_memory.",
        "retry.max_no_progress": "Attempts in a row without a new checkpoint, after which it gives "
        "up. Preemption and node failure never count.",
        "retry.hang_timeout_s": "Seconds without a finished step, after which the run is hung.",
        "tracking": "What is recorded.",
        "tracking.wandb": "Weights & Biases; null: not used. The key comes from the environment.",
        "tracking.wandb.project": "The project. Unset: wandb's own default.",
        "tracking.wandb.entity": "The user or team. Unset: wandb's own default.",
        "tracking.wandb.mode": "offline keeps everything on disk, for `wandb sync`.",
        "tracking.wandb.tags": "Tags of the run.",
        "tracking.log_interval": "Optimizer steps between two records of metrics.",
        "tracking.sample_ids": "Also record the id of every sample that each rank trained on.",
    }
)

_OWN_KIND: Schema = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_]"}
_NUMBER_OR_TEXT = ["string", "number"]


def run_spec_schema() -> Schema:
    """The JSON Schema (2020-12) of a spec file; every object in it refuses unknown keys."""
    schema = RunSpec.model_json_schema()
    parts: dict[str, Schema] = schema["$defs"]
    for section, options in (("ModelSpec", MODEL_OPTIONS), ("DataSpec", DATA_OPTIONS)):
        _add_options(parts, parts[section], options)
    for path, place in _keys(schema, parts, ()):
        place.pop("title", None)
        place["description"] = DESCRIPTIONS[path]

    schema["properties"]["name"]["pattern"] = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
    # YAML anchors have their place under keys like this.
    schema["patternProperties"] = {"^x-": {}}
    parts["TrainSpec"]["anyOf"] = [
        {"required": [key], "properties": {key: {"type": "number"}}}
        for key in ("max_steps", "epochs")
    ]
    resources = parts["ResourcesSpec"]["properties"]
    # Here a spec may leave numbers unquoted: they are text to whoever reads them.
    resources["env"]["additionalProperties"] = {"type": [*_NUMBER_OR_TEXT, "null"]}
    resources["additional_parameters"]["additionalProperties"] = {
        "anyOf": [{"type": _NUMBER_OR_TEXT}, {"const": True}]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "vitra run spec",
    }


def _add_options(
    parts: dict[str, Schema], section: Schema, options: Mapping[str, type[SpecModel]]
) -> None:
    """The options of each built-in kind, where that kind is asked for."""
    section["properties"]["kind"] = {"anyOf": [{"enum": list(options)}, _OWN_KIND]}
    section["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": kind}}},
            "then": {"properties": {"options": {"$ref": f"#/$defs/{model.__name__}"}}},
        }
        for kind, model in options.items()
    ]
    for model in options.values():
        parts[model.__name__] = part = model.model_json_schema()
        for place in part["properties"].values():
            place.pop("title", None)


def _keys(
    part: Schema, parts: Mapping[str, Schema], above: tuple[str, ...]
) -> Iterator[tuple[str, Schema]]:
    """(dotted path, its schema) of every key at and below a part, options apart."""
    for name, place in part["properties"].items():
        path = (*above, name)
        yield ".".join(path), place
        for inner in (place, *cast("list[Schema]", place.get("anyOf", []))):
            if "$ref" in inner:
                yield from _keys(parts[inner["$ref"].rpartition("/")[2]], parts, path)
