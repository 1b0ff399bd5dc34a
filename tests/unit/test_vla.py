"""The built-in model: initial weights, draws, loss, sampling and evaluation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.data import DataLoader

from trainer.components import (
    BUILT_IN_MODELS,
    Batch,
    DrawsPerSample,
    Evaluates,
    Model,
    ModelContext,
    Sample,
    resolve,
)
from trainer.data.keyed import SampleRandom, keyed_generator
from trainer.data.normalize import MinMax
from trainer.data.samples import DataMeta, stack
from trainer.data.synthetic import SyntheticData
from trainer.data.synthetic import build as build_data
from trainer.models.backbone import Backbone, hash_words
from trainer.models.diffusion import (
    DiffusionDraws,
    DiffusionHead,
    sampling_timesteps,
    signal_levels,
)
from trainer.models.evaluation import held_out_errors, mean_errors
from trainer.models.vla import Vla, build
from trainer.spec.errors import UsageError

REPEATS = 3
SMALL = {"dim": 24, "layers": 2, "action_width": 24, "action_layers": 2, "heads": 2}


def synthetic(**options: Any) -> SyntheticData:
    return build_data({"samples": 32, "holdout": 10, "image_size": 32, **options}, 5)


def initialized(model: Vla, seed: int = 0) -> Vla:
    model.init_buffers()
    for name, parameter in model.named_parameters():
        generator = torch.Generator()
        generator.manual_seed(int(keyed_generator(seed, name).integers(2**32)))
        model.init_parameter(name, parameter, generator)
    return model


def small_model(data: SyntheticData, *, perturbed: bool = True, **options: Any) -> Vla:
    """A tiny model; `perturbed` as if after some training, when the zero-initialised gates of the
    head are open and the condition matters."""
    model = build({**SMALL, **options}, ModelContext(data.meta, REPEATS))
    initialized(model)
    if perturbed:
        generator = torch.Generator()
        generator.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch_of(data: SyntheticData, model: Vla, indices: range | list[int]) -> Batch:
    randoms = [SampleRandom(0, 0, index) for index in indices]
    return data.collate(
        [model.draws(data.sample(r.sample, r), r) for r in randoms],
    )


def metaworld_like(**changes: Any) -> DataMeta:
    four = MinMax((-1.0,) * 4, (1.0,) * 4)
    fields = {
        "image_shape": (3, 96, 96),
        "chunk": 16,
        "fps": 20.0,
        "instructions": ("open the door", "close the door"),
        "state": four,
        "action": four,
    }
    return DataMeta(**{**fields, **changes})


# ----------------------------------------------------------------- size and initial weights


def test_it_offers_the_protocols_and_stays_small() -> None:
    factory = resolve("vla", BUILT_IN_MODELS, "model.kind")
    model = factory({}, ModelContext(metaworld_like(), 4))
    assert isinstance(model, Model)
    assert isinstance(model, DrawsPerSample)
    assert isinstance(model, Evaluates)
    assert sum(p.numel() for p in model.parameters()) <= 2_000_000
    backbone = [n for n, _ in model.named_parameters() if n.startswith(model.backbone_prefixes)]
    assert set(backbone) == {f"backbone.{n}" for n, _ in model.backbone.named_parameters()}
    sharded = [m for m in model.modules() if isinstance(m, model.shard_classes)]
    assert len(sharded) == 6


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    context = ModelContext(metaworld_like(), 1)
    with torch.device("meta"):
        on_meta = build(SMALL, context)
    on_meta.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*on_meta.parameters(), *on_meta.buffers()):
            tensor.fill_(-77)
    initialized(on_meta, seed=1)
    torch.manual_seed(123)
    plain = initialized(build(SMALL, context), seed=1)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**dict(on_meta.named_parameters()), **dict(on_meta.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert not (tensor == -77).any(), name

    other = initialized(build(SMALL, context), seed=2)
    assert not torch.equal(other.backbone.state.weight, plain.backbone.state.weight)
    first, second = (block.attention.qkv.weight for block in plain.head.blocks[:2])
    assert not torch.equal(first, second)


def test_initial_weights_have_the_scale_of_their_kind() -> None:
    model = initialized(build({}, ModelContext(metaworld_like(), 1)))
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            assert (module.weight == 1).all(), name
        elif name.endswith(("modulation", "output")):
            assert not module.weight.any(), name
        elif isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx(0.88 * fan_in**-0.5, rel=0.2), name
            assert not module.bias.any(), name
    assert model.head.null_condition.std() > 0
    assert model.backbone.word_embedding.weight.std().item() == pytest.approx(0.0176, rel=0.1)


def test_buffers_are_not_saved() -> None:
    data = synthetic()
    model = small_model(data)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_words_are_hashed() -> None:
    ids = hash_words("Pick up the RED ball, the small_one!", vocabulary=64, max_words=10)
    assert ids[2] == ids[5] == hash_words("the", 64, 1)[0]
    assert ids[3] == hash_words("red", 64, 1)[0]
    assert ids[8:] == [0, 0]
    assert all(0 < word < 64 for word in ids[:8])
    assert hash_words("one two three", 64, 2) == hash_words("One, two", 64, 2)
    # The numbers are part of what a checkpoint means: they must never change.
    assert hash_words("lift the cup", 1024, 4) == [836, 139, 425, 0]


def test_data_it_cannot_take_is_refused() -> None:
    with pytest.raises(UsageError, match="meta is a dict"):
        build({}, ModelContext({"chunk": 4}, 1))
    with pytest.raises(UsageError, match=r"images of 64x8 pixels .* 16x16"):
        build({}, ModelContext(metaworld_like(image_shape=(3, 8, 64)), 1))


# --------------------------------------------------------------------------------- draws


class DrawnSamples(torch.utils.data.Dataset[Sample]):
    def __init__(self, data: SyntheticData, draws: DiffusionDraws) -> None:
        self.data, self.draws = data, draws

    def __getitem__(self, index: int) -> Sample:
        rng = SampleRandom(seed=8, epoch=2, sample=index)
        return self.draws(self.data.sample(index, rng), rng)


# The workers are forked as the trainer's are.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_draws_do_not_depend_on_order_or_process() -> None:
    data = synthetic()
    draws = DiffusionDraws(repeats=2, diffusion_steps=100, condition_dropout=0.5)
    samples = DrawnSamples(data, pickle.loads(pickle.dumps(draws)))
    order = [4, 1, 9, 0]
    here = data.collate([samples[index] for index in sorted(order)])
    loader = DataLoader(samples, sampler=order, batch_size=1, num_workers=2, collate_fn=stack)
    for batch in loader:
        row = sorted(order).index(int(batch["index"]))
        for name, value in batch.items():
            assert torch.equal(value[0], here[name][row]), name


def test_draws_differ_by_repeat_epoch_and_sample() -> None:
    sample = synthetic(chunk=6).sample(0, SampleRandom(0, 0, 0))
    draws = DiffusionDraws(repeats=4, diffusion_steps=1000, condition_dropout=0.5)
    one = draws(sample, SampleRandom(0, 0, 0))
    assert one["noise"].shape == (4, 6, 4)
    assert one["noise"].dtype == np.float32
    assert (one["timestep"].shape, one["timestep"].dtype) == ((4,), np.int64)
    assert (one["drop_condition"].shape, one["drop_condition"].dtype) == ((4,), np.bool_)
    streams = [one["noise"][r] for r in range(4)]
    others = (SampleRandom(0, 1, 0), SampleRandom(0, 0, 1), SampleRandom(1, 0, 0))
    streams += [draws(sample, other)["noise"][0] for other in others]
    assert len({stream.tobytes() for stream in streams}) == len(streams)
    assert len(set(one["timestep"].tolist())) > 1


def test_draws_have_the_right_distribution() -> None:
    sample = synthetic(chunk=2).sample(0, SampleRandom(0, 0, 0))
    draws = DiffusionDraws(repeats=4, diffusion_steps=10, condition_dropout=0.25)
    many = [draws(sample, SampleRandom(0, 0, index)) for index in range(500)]
    timesteps = np.concatenate([one["timestep"] for one in many])
    assert np.bincount(timesteps, minlength=10).min() > 140
    assert timesteps.max() == 9
    dropped = np.concatenate([one["drop_condition"] for one in many])
    assert dropped.mean() == pytest.approx(0.25, abs=0.04)
    noise = np.concatenate([one["noise"].ravel() for one in many])
    assert (noise.mean(), noise.std()) == pytest.approx((0.0, 1.0), abs=0.03)


# ---------------------------------------------------------------------------------- loss


def test_the_first_prediction_is_zero() -> None:
    data = synthetic()
    model = small_model(data, perturbed=False)
    batch = batch_of(data, model, range(6))
    valid = batch["mask"][:, None, :, None].expand_as(batch["noise"])
    expected = batch["noise"][valid].square().sum()
    assert model(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.loss_count(batch) == int(valid.sum())


def test_loss_and_count_add_up_over_samples_repeats_and_masks() -> None:
    data = synthetic()
    model = small_model(data)
    batch = batch_of(data, model, range(6))
    assert len(set(batch["mask"].sum(dim=1).tolist())) > 1
    whole, count = model(batch), model.loss_count(batch)
    assert (whole.dtype, whole.shape) == (torch.float32, ())

    singly = [batch_of(data, model, [index]) for index in range(6)]
    assert sum(model(one).item() for one in singly) == pytest.approx(whole.item(), rel=1e-5)
    assert sum(model.loss_count(one) for one in singly) == count

    by_repeat = [
        {**batch, **{k: batch[k][:, r : r + 1] for k in ("noise", "timestep", "drop_condition")}}
        for r in range(REPEATS)
    ]
    assert sum(model(one).item() for one in by_repeat) == pytest.approx(whole.item(), rel=1e-5)
    assert sum(model.loss_count(one) for one in by_repeat) == count

    inverse = {**batch, "mask": ~batch["mask"]}
    everything = {**batch, "mask": torch.ones_like(batch["mask"])}
    added = model(inverse) + whole
    assert added.item() == pytest.approx(model(everything).item(), rel=1e-5)
    assert model.loss_count(everything) == 6 * REPEATS * 8 * 4
    assert model.loss_count(inverse) == model.loss_count(everything) - count


def test_the_backbone_runs_once_for_each_sample() -> None:
    data = synthetic()
    model = small_model(data)
    seen: list[tuple[str, int]] = []

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        seen.append((type(module).__name__, len(output)))

    for module in (model.backbone, model.head):
        module.register_forward_hook(note)
    model(batch_of(data, model, range(5)))
    assert seen == [(Backbone.__name__, 5), (DiffusionHead.__name__, 5 * REPEATS)]


def test_the_cognition_feature_is_the_learned_token() -> None:
    """Without blocks between, nothing but the token itself comes out."""
    backbone = small_model(synthetic()).backbone
    backbone.blocks = nn.ModuleList()
    image = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    feature = backbone(image, torch.zeros(2, 16, dtype=torch.int64), torch.rand(2, 4))
    expected = backbone.norm(backbone.cognition_token).expand(2, -1)
    torch.testing.assert_close(feature, expected)


def test_every_parameter_takes_part() -> None:
    data = synthetic()
    model = small_model(data)
    batch = batch_of(data, model, range(4))
    batch["drop_condition"][:, 0] = True
    batch["drop_condition"][:, 1] = False
    model(batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_a_dropped_condition_hides_what_is_seen() -> None:
    data = synthetic()
    model = small_model(data)
    batch = batch_of(data, model, range(4))
    other = {**batch, "image": 255 - batch["image"], "state": -batch["state"]}
    other["task"] = (batch["task"] + 1) % 4
    batch["drop_condition"].fill_(False)
    assert model(batch).item() != pytest.approx(model(other).item(), rel=1e-4)
    batch["drop_condition"].fill_(True)
    model.zero_grad()
    loss = model(batch)
    assert loss.item() == model({**other, "drop_condition": batch["drop_condition"]}).item()
    loss.backward()
    assert model.head.null_condition.grad.any()
    assert not any(p.grad.any() for p in model.backbone.parameters() if p.grad is not None)


def test_recomputing_activations_changes_nothing() -> None:
    data = synthetic()
    plain = small_model(data)
    recomputing = copy.deepcopy(plain)
    apply_activation_checkpointing(
        recomputing,
        checkpoint_wrapper_fn=partial(
            checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, plain.checkpoint_classes),
    )
    batch = batch_of(data, plain, range(4))
    losses = [model(batch) for model in (plain, recomputing)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_loss_is_float32_under_autocast() -> None:
    data = synthetic()
    model = small_model(data)
    batch = batch_of(data, model, range(4))
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(batch)
    assert rounded.dtype == torch.float32
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)


def test_parameters_in_bfloat16_keep_a_float32_loss() -> None:
    data = synthetic()
    model = small_model(data)
    batch = batch_of(data, model, range(4))
    exact = model(batch)
    rounded = model.bfloat16()(batch)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.1)


def test_it_learns() -> None:
    data = synthetic(mask=False, image_size=16)
    model = small_model(data, perturbed=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        batch = batch_of(data, model, [(8 * step + n) % 32 for n in range(8)])
        loss = model(batch) / model.loss_count(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[:5]) == pytest.approx(1.0, abs=0.2)
    assert np.mean(losses[-5:]) < 0.7


# ------------------------------------------------------------------------------ sampling


def test_the_noise_schedule() -> None:
    levels = signal_levels(100)
    assert levels[0] > 0.99
    assert (np.diff(levels) < 0).all()
    assert 0 < levels[-1] < 1e-3
    assert sampling_timesteps(100, 10) == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]
    assert sampling_timesteps(7, 2) == [3, 0]


def test_noise_is_added_by_the_schedule() -> None:
    head = small_model(synthetic()).head
    actions, noise = torch.randn(2, 8, 4), torch.randn(2, 8, 4)
    noisy = head.add_noise(actions, noise, torch.tensor([0, 60]))
    for n, level in enumerate(signal_levels(100)[[0, 60]]):
        expected = level**0.5 * actions[n] + (1 - level) ** 0.5 * noise[n]
        torch.testing.assert_close(noisy[n], expected.float())


def test_sampling_with_a_perfect_head_recovers_the_action() -> None:
    class Perfect(DiffusionHead):
        """Knows the action, and so the noise."""

        actions = torch.rand(3, 8, 4) * 2 - 1
        noises: ClassVar[list[Tensor]] = []

        def forward(self, noisy: Tensor, timestep: Tensor, cognition: Tensor) -> Tensor:
            assert cognition.shape == (3, 24)
            signal = self.signal[timestep].view(-1, 1, 1)
            noise = (noisy - signal.sqrt() * self.actions) / (1 - signal).sqrt()
            self.noises.append(noise)
            return noise

    head = small_model(synthetic()).head
    head.__class__ = Perfect
    sampled = head.sample(torch.zeros(3, 24), torch.randn(3, 8, 4))
    torch.testing.assert_close(sampled, Perfect.actions, atol=1e-4, rtol=0)
    # DDIM goes down one line: at each timestep the same noise is left, in the schedule's amount.
    assert len(Perfect.noises) == 10
    for noise in Perfect.noises[1:]:
        torch.testing.assert_close(noise, Perfect.noises[0], atol=1e-3, rtol=0)


# ---------------------------------------------------------------------------- evaluation


def evaluated(model: Vla, data: SyntheticData, world_size: int) -> list[Mapping[str, float]]:
    return [model.evaluate(data, 11, rank, world_size) for rank in range(world_size)]


def added_up(parts: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def test_evaluation_adds_up_to_the_same_at_every_world_size() -> None:
    data = synthetic()
    model = small_model(data, eval_frames=5, eval_samples=3)
    model.train()
    alone = evaluated(model, data, 1)[0]
    assert set(model.summarize_evaluation(alone)) == {
        "mse_model",
        "mse_task_mean",
        "mse_unconditioned",
        "mse_wrong_instruction",
    }
    for world_size in (2, 3, 8):
        parts = evaluated(model, data, world_size)
        assert all(part.keys() == alone.keys() for part in parts)
        assert added_up(parts) == pytest.approx(dict(alone), rel=1e-12)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert model.evaluate(data, 12, 0, 1)["model"] != alone["model"]


def test_nothing_held_out_gives_no_figures() -> None:
    data = synthetic(holdout=0)
    model = small_model(data)
    sums = model.evaluate(data, 0, 0, 1)
    assert sums == {}
    assert model.summarize_evaluation(sums) == {}


class Constant:
    """Samples the condition itself at each step: 0.5 told right, 1 told wrong, 0 unconditioned."""

    def __init__(self, action_dim: int) -> None:
        self.action_dim = action_dim
        self.told: list[list[int]] = []

    def cognition(self, image: Tensor, task: Tensor, state: Tensor) -> Tensor:
        assert len(image) == len(task) == len(state)
        self.told.append(task.tolist())
        return torch.tensor([0.5, 1.0])[: len(task)].unsqueeze(1)

    def sample_actions(self, cognition: Tensor, dropped: Tensor, noise: Tensor) -> Tensor:
        condition = torch.where(dropped.unsqueeze(1), 0.0, cognition)
        right, *others = noise.unflatten(0, (len(condition.unique()), -1))
        assert all(torch.equal(right, other) for other in others), "conditions start alike"
        assert len(right.unique(dim=0)) == len(right), "samples do not"
        return condition.unsqueeze(-1).expand(noise.shape)


def test_errors_are_over_valid_steps_against_the_expert() -> None:
    data = synthetic(chunk=5, holdout=6)
    model = Constant(4)
    sums = held_out_errors(
        model,
        data,
        frames=100,
        samples=2,
        seed=0,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    )
    held_out = [data.held_out_sample(number) for number in range(6)]
    valid = np.concatenate([sample["action"][sample["mask"]] for sample in held_out])
    mean = np.concatenate(
        [np.broadcast_to(data.task_mean_action[s["task"]], (5, 4))[s["mask"]] for s in held_out]
    )
    errors = mean_errors(sums)
    assert sums["elements"] == valid.size
    assert errors["mse_model"] == pytest.approx(((valid - 0.5) ** 2).mean(), rel=1e-5)
    assert errors["mse_wrong_instruction"] == pytest.approx(((valid - 1) ** 2).mean(), rel=1e-5)
    assert errors["mse_unconditioned"] == pytest.approx((valid**2).mean(), rel=1e-5)
    assert errors["mse_task_mean"] == pytest.approx(((valid - mean) ** 2).mean(), rel=1e-5)
    assert [right for right, _ in model.told] == [int(s["task"]) for s in held_out]
    assert all(right != wrong for right, wrong in model.told)
    assert len({(wrong - right) % 4 for right, wrong in model.told}) == 3


def test_frames_to_judge_are_spread_evenly() -> None:
    data = synthetic(holdout=10)
    seen: list[int] = []
    inner = data.held_out_sample
    data.held_out_sample = lambda number: seen.append(number) or inner(number)  # type: ignore[method-assign]
    model = small_model(data, eval_frames=4, eval_samples=1)
    for rank in range(2):
        model.evaluate(data, 0, rank, 2)
    assert sorted(seen) == [0, 2, 5, 7]
