"""The planner: exact or refused, and what a refusal proposes works and is nearest."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.fixes import Fix, NoExactPlan
from launcher.planner import check_samples, plan, public_view, replan
from trainer.spec.errors import PlanError
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec

RUN = {"run_id": "a-20250101-000000-abcd", "run_dir": "/runs/a-20250101-000000-abcd"}


def document(**fields: object) -> dict[str, Any]:
    """A spec as a mapping, `fields` by dotted names with __ for the dot."""
    doc: dict[str, Any] = {
        "name": "a",
        "model": {"kind": "vla"},
        "data": {"kind": "synthetic"},
        "train": {"global_batch_size": 512, "max_steps": 100},
    }
    for field, value in fields.items():
        put(doc, field.replace("__", "."), value)
    return doc


def put(doc: dict[str, Any], field: str, value: object) -> None:
    *sections, last = field.split(".")
    for section in sections:
        doc = doc.setdefault(section, {})
    doc[last] = value


def plan_of(doc: dict[str, Any], **kwargs: str) -> Plan:
    return plan(RunSpec.model_validate(doc), **RUN, **kwargs)


def apply(doc: dict[str, Any], fix: Fix) -> dict[str, Any]:
    changed = copy.deepcopy(doc)
    for field, value in fix.changes:
        put(changed, field, value)
    return changed


@dataclass(frozen=True)
class Case:
    """The numbers of a small batch equation."""

    batch: int
    least: int
    most: int
    tasks: int
    per_device: int | None
    limit: int | None
    replicate: int
    gpus: bool

    def document(self) -> dict[str, Any]:
        elastic = self.most > self.least
        return document(
            train__global_batch_size=self.batch,
            train__per_device_batch_size=self.per_device,
            train__max_per_device_batch_size=self.limit,
            train__strategy="fsdp-full",
            train__replicate=self.replicate,
            resources__nodes={"min": self.least, "max": self.most} if elastic else self.least,
            **{
                "resources__gpus_per_node" if self.gpus else "resources__tasks_per_node": (
                    f"a100:{self.tasks}" if self.gpus else self.tasks
                )
            },
        )

    def solutions(self, nodes: int) -> list[tuple[int, int]]:
        """Every (per_device, accumulation) that solves the equation, found by trying."""
        world = nodes * self.tasks
        if world % self.replicate:
            return []
        tried = [self.per_device] if self.per_device else range(1, self.batch // world + 1)
        return [
            (per_device, accumulation)
            for per_device in tried
            if self.limit is None or per_device <= self.limit
            for accumulation in range(1, self.batch // (per_device * world) + 1)
            if per_device * world * accumulation == self.batch
        ]

    def workable(self) -> bool:
        return any(self.solutions(n) for n in range(self.least, self.most + 1))


small = st.integers(1, 12)
cases = st.builds(
    lambda batch, least, extra, tasks, per_device, limit, replicate, gpus: Case(
        batch, least, least + extra, tasks, per_device, limit, replicate, gpus
    ),
    batch=st.integers(1, 160),
    least=st.integers(1, 8),
    extra=st.sampled_from([0, 0, 1, 4]),
    tasks=st.integers(1, 6),
    per_device=st.none() | small,
    limit=st.none() | small,
    replicate=st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8]),
    gpus=st.booleans(),
)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_a_plan_is_exact_and_a_refusal_is_right(case: Case) -> None:
    counts = range(case.least, case.most + 1)
    possible = {n: s for n in counts if (s := case.solutions(n))}
    try:
        planned = plan_of(case.document())
    except NoExactPlan:
        assert not possible
        return
    assert possible
    shapes = planned.elastic or [planned]
    assert [shape.nodes for shape in shapes] == sorted(possible)
    assert sorted([*possible, *planned.unusable_nodes]) == list(counts)
    for shape in shapes:
        assert shape.world_size == shape.nodes * case.tasks
        found = (shape.per_device_batch_size, shape.grad_accumulation_steps)
        assert found == max(possible[shape.nodes]), "not the largest per-device batch"
    assert planned.nodes == max(possible)
    assert planned.global_batch_size == case.batch
    assert planned.tasks_per_node == case.tasks


def single_changes(case: Case) -> Iterator[tuple[str, int, Case]]:
    """Every change of one field: the field, its old value, the changed case."""
    for batch in range(1, 1200):
        yield "train.global_batch_size", case.batch, replace(case, batch=batch)
    if case.per_device is not None:
        for value in range(1, 161):
            yield "train.per_device_batch_size", case.per_device, replace(case, per_device=value)
    for value in range(1, 70):
        yield "train.replicate", case.replicate, replace(case, replicate=value)
    for value in range(1, 165):
        if not case.gpus:
            yield "resources.tasks_per_node", case.tasks, replace(case, tasks=value)
        elif value < case.tasks:
            yield "resources.gpus_per_node", case.tasks, replace(case, tasks=value)
        if case.most == case.least:
            yield "resources.nodes", case.least, replace(case, least=value, most=value)
        elif value < case.least:
            yield "resources.nodes.min", case.least, replace(case, least=value)
        elif value > case.most:
            yield "resources.nodes.max", case.most, replace(case, most=value)


def changed_value(field: str, case: Case) -> int:
    return {
        "train.global_batch_size": case.batch,
        "train.per_device_batch_size": case.per_device or 0,
        "train.replicate": case.replicate,
        "resources.tasks_per_node": case.tasks,
        "resources.gpus_per_node": case.tasks,
        "resources.nodes": case.least,
        "resources.nodes.min": case.least,
        "resources.nodes.max": case.most,
    }[field]


@given(cases.filter(lambda case: not case.workable()))
@settings(max_examples=40, deadline=None)
def test_what_a_refusal_proposes_works_and_is_nearest(case: Case) -> None:
    doc = case.document()
    with pytest.raises(NoExactPlan) as refused:
        plan_of(doc)
    fixes = refused.value.fixes
    assert fixes, "a refusal without a way out"
    for fix in fixes:
        plan_of(apply(doc, fix))
        for field, value in fix.changes:
            assert field in str(refused.value)
            assert str(value) in str(refused.value)

    nearest: dict[str, dict[bool, int]] = {}
    for field, old, changed in single_changes(case):
        value = changed_value(field, changed)
        if value != old and changed.workable():
            sides = nearest.setdefault(field, {})
            best = sides.get(value > old)
            if best is None or abs(value - old) < abs(best - old):
                sides[value > old] = value
    expected = {
        (field, f"a100:{value}" if field == "resources.gpus_per_node" else value)
        for field, sides in nearest.items()
        for value in sides.values()
    }
    found = {
        fix.changes[0]
        for fix in fixes
        if len(fix.changes) == 1 and fix.fields != ("train.max_per_device_batch_size",)
    }
    assert found == expected


def refusal(**fields: object) -> str:
    with pytest.raises(PlanError) as refused:
        plan_of(document(**fields))
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_a_refusal_names_fields_values_and_what_would_work() -> None:
    assert refusal(
        train__global_batch_size=256,
        train__per_device_batch_size=16,
        resources__nodes=3,
        resources__tasks_per_node=4,
    ) == (
        "train.global_batch_size=256 is not a multiple of 16 x 12 = 192 "
        "(train.per_device_batch_size=16, world size 12: resources.nodes=3 x "
        "resources.tasks_per_node=4); use 192 or 384, or resources.nodes=2 or 4"
    )
    assert refusal(
        train__global_batch_size=256, resources__nodes=3, resources__gpus_per_node="a100:8"
    ) == (
        "train.global_batch_size=256 is not a multiple of 3 x 8 = 24 (resources.nodes=3 x "
        "resources.gpus_per_node=a100:8); use 240 or 264, or resources.nodes=2 or 4"
    )
    assert refusal(train__per_device_batch_size=64, train__max_per_device_batch_size=48) == (
        "train.per_device_batch_size=64 is more than train.max_per_device_batch_size=48; "
        "use 32, or train.max_per_device_batch_size=64"
    )
    assert refusal(
        train__strategy="fsdp-full",
        train__replicate=3,
        resources__nodes=2,
        resources__gpus_per_node=4,
    ) == (
        "train.replicate=3 does not divide the world size 2 x 4 = 8 "
        "(resources.nodes=2 x resources.gpus_per_node=4); use 2 or 4"
    )


def test_a_range_without_any_workable_count_is_refused() -> None:
    assert refusal(
        train__global_batch_size=128,
        resources__nodes={"min": 5, "max": 7},
        resources__tasks_per_node=4,
    ) == (
        "train.global_batch_size=128 is not a multiple of the world size at any node count "
        "(resources.nodes.min=5 to resources.nodes.max=7 x resources.tasks_per_node=4); "
        "use 120 or 140, or resources.nodes.min=4, or resources.nodes.max=8"
    )


def test_changing_gpus_also_changes_tasks_that_are_written_out() -> None:
    doc = document(
        train__global_batch_size=16,
        resources__nodes=1,
        resources__gpus_per_node="h100:3",
        resources__tasks_per_node=3,
    )
    with pytest.raises(NoExactPlan) as refused:
        plan_of(doc)
    assert Fix((("resources.gpus_per_node", "h100:2"), ("resources.tasks_per_node", 2))) in (
        refused.value.fixes
    )


def test_batch_smaller_than_the_world_is_refused() -> None:
    assert refusal(
        train__global_batch_size=8, resources__nodes=2, resources__gpus_per_node=8
    ).endswith("use 16, or resources.nodes=1, or resources.gpus_per_node=4")


def test_the_default_per_device_batch_is_everything_without_accumulation() -> None:
    planned = plan_of(document(train__global_batch_size=512, resources__gpus_per_node=8))
    assert (planned.per_device_batch_size, planned.grad_accumulation_steps) == (64, 1)


def test_elastic_shapes_notes_and_the_plan_itself() -> None:
    planned = plan_of(
        document(
            train__global_batch_size=512,
            train__max_per_device_batch_size=16,
            resources__nodes={"min": 2, "max": 9},
            resources__gpus_per_node=8,
        )
    )
    assert [
        (s.nodes, s.per_device_batch_size, s.grad_accumulation_steps) for s in planned.elastic
    ] == [
        (2, 16, 2),
        (4, 16, 1),
        (8, 8, 1),
    ]
    assert (planned.nodes, planned.world_size) == (8, 64)
    assert planned.unusable_nodes == (3, 5, 6, 7, 9)
    (note,) = planned.notes
    assert "3, 5-7, 9" in note
    assert "idle" in note


def test_the_largest_range_is_planned_within_a_second() -> None:
    doc = document(
        train__global_batch_size=2095133040,  # 1600 divisors
        train__max_per_device_batch_size=60000,
        resources__nodes={"min": 1, "max": 65536},
    )
    began = time.perf_counter()
    planned = plan_of(doc)
    # No plan: every proposal is searched as well.
    put(doc, "train.strategy", "fsdp-full")
    put(doc, "train.replicate", 46337)
    with pytest.raises(NoExactPlan):
        plan_of(doc)
    assert time.perf_counter() - began < 2
    assert len(planned.elastic) + len(planned.unusable_nodes) == 65536
    assert len(planned.notes[0]) < 300


def test_steps_are_known_where_max_steps_decides() -> None:
    planned = plan_of(document(train__max_steps=250, train__warmup_ratio=0.03))
    assert (planned.total_steps, planned.warmup_steps) == (250, 7)
    planned = plan_of(document(train__max_steps=None, train__epochs=1.5))
    assert (planned.total_steps, planned.warmup_steps) == (None, None)
    assert planned.with_samples(1000).total_steps == 3
    # 65 samples in steps of 8: the ninth step of each rank goes on into the next epoch.
    ranks = {"resources__tasks_per_node": 4, "resources__gpus_per_node": 0}
    odd = document(train__max_steps=None, train__epochs=1, train__global_batch_size=8, **ranks)
    assert plan_of(odd).with_samples(65).total_steps == 9
    assert plan_of(odd).with_samples(64).total_steps == 8


@pytest.mark.parametrize(
    ("uri", "base_dir", "expected"),
    [
        (None, "/here", "/runs/a-20250101-000000-abcd/checkpoints"),
        ("s3://b/{name}/{run_id}", "/here", "s3://b/a/a-20250101-000000-abcd"),
        ("/ckpt/{run_id}", "/here", "/ckpt/a-20250101-000000-abcd"),
        ("out/{name}-%s-{0}", "/he re", "/he re/out/a-%s-{0}"),
        ("out", None, "out"),
    ],
)
def test_the_checkpoint_place(uri: str | None, base_dir: str | None, expected: str) -> None:
    assert plan_of(document(checkpoint__uri=uri), base_dir=base_dir).checkpoint_uri == expected


def test_notes_say_how_a_time_was_read() -> None:
    assert plan_of(document()).notes == ()
    first, second = plan_of(document(resources__time="1:30")).notes
    assert first == "resources.time: 1:30 is 1 min 30 s, rounded up to 2 min"
    assert "resources.signal_lead_s=120" in second
    assert "180 s before the end" in second


@pytest.mark.parametrize(("minutes", "warned"), [(1, True), (5, True), (6, False), (1440, False)])
def test_a_signal_lead_close_to_the_time_limit_is_warned_about(minutes: int, warned: bool) -> None:
    notes = plan_of(document(resources__time=minutes)).notes
    assert any("signal_lead_s" in note for note in notes) == warned


def test_notes_on_the_schedule() -> None:
    freezing = {"train__lr_scheduler_type": "backbone-freeze-warmup", "train__max_steps": 100}
    (note,) = plan_of(document(**freezing, train__freeze_steps=100)).notes
    assert "train.freeze_steps=100" in note
    assert plan_of(document(**freezing, train__freeze_steps=99)).notes == ()
    (note,) = plan_of(document(train__max_steps=10, train__epochs=2)).notes
    assert "train.epochs is not used" in note


@given(cases, st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_a_batch_beyond_the_data_is_refused_with_what_fits(case: Case, n_samples: int) -> None:
    doc = case.document()
    try:
        planned = plan_of(doc)
    except NoExactPlan:
        return
    if n_samples >= case.batch:
        check_samples(planned, n_samples)
        return
    with pytest.raises(NoExactPlan) as refused:
        check_samples(planned, n_samples)
    fitting = [b for b in range(1, n_samples + 1) if replace(case, batch=b).workable()]
    assert [fix.changes for fix in refused.value.fixes] == (
        [(("train.global_batch_size", max(fitting)),)] if fitting else []
    )
    for fix in refused.value.fixes:
        check_samples(plan_of(apply(doc, fix)), n_samples)


def test_a_batch_beyond_the_data_in_words() -> None:
    doc = document(resources__gpus_per_node=8, train__per_device_batch_size=16)
    with pytest.raises(NoExactPlan, match=r"512 is more than the 300 samples .*; use at most 256"):
        check_samples(plan_of(doc), 300)
    with pytest.raises(NoExactPlan, match=r"the 100 samples .*16 x 8 = 128 samples does not fit"):
        check_samples(plan_of(doc), 100)
    with pytest.raises(NoExactPlan, match="no samples"):
        check_samples(plan_of(doc), 0)


def test_replan_keeps_the_run_and_its_data() -> None:
    doc = document(train__max_steps=None, train__epochs=2, checkpoint__uri="ckpt/{run_id}")
    old = plan_of(doc, base_dir="/where/submitted").with_samples(1024)
    changed = copy.deepcopy(doc)
    put(changed, "train.epochs", 4)
    put(changed, "resources.tasks_per_node", 2)
    new = replan(old, RunSpec.model_validate(changed), base_dir="/elsewhere")
    assert (new.run_id, new.run_dir, new.n_samples) == (old.run_id, old.run_dir, 1024)
    assert (old.total_steps, new.total_steps, new.world_size) == (4, 8, 2)
    assert new.checkpoint_uri == old.checkpoint_uri == "/where/submitted/ckpt/" + old.run_id
    assert new.spec_digest != old.spec_digest

    put(changed, "checkpoint.uri", "other")
    assert replan(old, RunSpec.model_validate(changed), base_dir="/x").checkpoint_uri == "/x/other"
    put(changed, "train.global_batch_size", 2048)
    with pytest.raises(NoExactPlan, match="1024 samples"):
        replan(old, RunSpec.model_validate(changed))


def test_replan_before_the_data_is_known() -> None:
    doc = document(train__max_steps=None, train__epochs=2)
    assert replan(plan_of(doc), RunSpec.model_validate(doc)).total_steps is None


def test_the_public_view_has_its_documented_keys() -> None:
    view = public_view(plan_of(document(resources__nodes=2, resources__gpus_per_node=4)))
    documented = {
        "name": "a",
        "strategy": "ddp",
        "world_size": 8,
        "nodes": 2,
        "tasks_per_node": 4,
        "global_batch_size": 512,
        "per_device_batch_size": 64,
        "grad_accumulation_steps": 1,
        "total_steps": 100,
        "warmup_steps": 3,
        "time_limit_min": 1440,
        "checkpoint_uri": RUN["run_dir"] + "/checkpoints",
        "elastic": None,
    }
    assert documented.items() <= view.items()
    view = public_view(plan_of(document(resources__nodes={"min": 2, "max": 3})))
    assert view["elastic"] == [
        {"nodes": 2, "world_size": 2, "per_device_batch_size": 256, "grad_accumulation_steps": 1}
    ]
    assert view["unusable_nodes"] == [3]
