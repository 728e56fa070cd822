"""Lightning's Trainer steps every optimizer as a plain loop does; checkpoints go on bit for bit."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from tests.documents import on_launched_ranks
from tests.small_model import make_batches, make_model, make_optimizer

pytestmark = pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed")

NUM_STEPS, SAVED_AT = 6, 3
SAMPLES = 4
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
PARALLEL: dict[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "ddp": {"devices": 2, "strategy": "ddp"},
    "fsdp2, sharded": {"devices": 2},
    "fsdp2, whole": {"devices": 2},
}


def rate(step: int) -> float:
    return 1 / (step + 1)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def loop(name: str, *, accumulated: int = 1, after_backward: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """One process with the whole batches, without Lightning."""
    model = make_model()
    optimizer = make_optimizer(model, name)
    scheduler = LambdaLR(optimizer, rate)
    batches = zip(*make_batches(SAMPLES, num_steps=2 * NUM_STEPS), strict=True)
    for number, (x, y) in enumerate(islice(batches, NUM_STEPS * accumulated), 1):
        (nn.functional.mse_loss(model(x), y) / accumulated).backward()
        if number % accumulated == 0:
            if after_backward is not None:
                after_backward(model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model


def make_module(name: str, *, manual: bool = False, **options: Any) -> Any:
    """The small model as a LightningModule, which sees its rank's part of every batch."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.net = make_model()
            # Lightning begins an epoch anew where it resumes, so that batches are chosen by the number of the step.
            self.batches = make_batches(SAMPLES, num_steps=2 * NUM_STEPS)

        def configure_model(self) -> None:
            if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
                for layer in self.net:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, number: int) -> Any:
            accumulated = self.trainer.accumulate_grad_batches
            step = number if accumulated > 1 else self.global_step
            rank, size = self.global_rank, self.trainer.world_size
            inputs, targets = (each[step].chunk(size)[rank] for each in self.batches)
            loss = nn.functional.mse_loss(self.net(inputs), targets)
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
            return None

        def configure_optimizers(self) -> Any:
            group = dist.group.WORLD if self.trainer.world_size > 1 else None
            optimizer = make_optimizer(self.net, name, group=group, **options)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "step"},
            }

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if "state" in options:
                checkpoint["optimizer_states"] = [each.full_state_dict() for each in self.trainer.optimizers]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(2 * NUM_STEPS * self.trainer.world_size, 1))

    return Module()


def fit(module: Any, way: str, max_steps: int = NUM_STEPS, resume: str | None = None, **options: Any) -> Any:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    how = dict(PARALLEL[way])
    if "fsdp2" in way:
        sharded = way.endswith("sharded")
        how["strategy"] = ModelParallelStrategy(2, 1, save_distributed_checkpoint=sharded)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=max_steps, **how, **QUIET, **options)
    trainer.fit(module, ckpt_path=resume, weights_only=False if resume else None)
    return trainer


def whole(module: Any) -> dict[str, Tensor]:
    values = module.net.state_dict().items()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def trained_alone(name: str) -> dict[str, float]:
    """How far the ways to train with Lightning on one device are from a plain loop."""
    wanted = loop(name).state_dict()
    assert largest_difference(wanted, make_model().state_dict()) > 1e-3
    accumulated, cut = loop(name, accumulated=2).state_dict(), loop(name, after_backward=clipped).state_dict()
    runs = {
        "automatic": (make_module(name), {}, wanted),
        "manual": (make_module(name, manual=True), {}, wanted),
        "accumulated": (make_module(name), {"accumulate_grad_batches": 2}, accumulated),
        "clipped": (make_module(name), {"gradient_clip_val": 0.1}, cut),
    }
    errors = {}
    for way, (module, options, expected) in runs.items():
        fit(module, "one", **options)
        errors[way] = largest_difference(whole(module), expected)
    return errors


@pytest.mark.parametrize("name", ["Muon", "NorDion2"])
def test_equals_a_plain_loop(name: str) -> None:
    [errors] = on_launched_ranks(1, trained_alone, name)
    # Lightning takes the norm over parameters in the order of the groups, which rounds it otherwise.
    assert errors.pop("clipped") < 1e-12
    assert set(errors.values()) == {0.0}, errors


def resumed(way: str, name: str, folder: str, options: dict[str, Any]) -> tuple[float, bool, str]:
    """The error against one process, whether a resumed run has the bits of the unbroken one, and a momentum's type."""
    unbroken = make_module(name, **options)
    trainer = fit(unbroken, way)
    first, path = make_module(name, **options), str(Path(folder, "saved"))
    fit(first, way, SAVED_AT).save_checkpoint(path)
    second = make_module(name, **options)
    fit(second, way, resume=path)
    same = all(torch.equal(value, whole(unbroken)[key]) for key, value in whole(second).items())
    error = largest_difference(whole(unbroken), loop(name).state_dict())
    states = trainer.optimizers[0].state.values()
    kinds = {type(state["momentum"]).__name__ for state in states if "momentum" in state}
    return error, same, ", ".join(kinds)


@pytest.mark.parametrize(
    ("way", "name", "options"),
    [
        ("one", "NorDion2", {}),
        ("ddp", "Dion2", {}),
        ("ddp", "NorMuon", {"state": "layerwise"}),
        ("fsdp2, sharded", "NorDion2", {}),
        ("fsdp2, whole", "NorDion2", {"transport": "full"}),
    ],
)
def test_resumes_with_the_same_bits(way: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = PARALLEL[way]["devices"]
    for error, same, kind in on_launched_ranks(ranks, resumed, way, name, str(tmp_path), options):
        assert error < 1e-7
        assert same
        # One rank may own no matrix layer by layer.
        assert kind == ("DTensor" if "fsdp2" in way else "Tensor") or (not kind and options)


def scaled(overflow_at: int) -> tuple[float, float, str]:
    """Scaled losses, one infinite: the error against a loop without that step, the scale, how clipping is refused."""
    from lightning.pytorch.plugins import MixedPrecision

    class Scaling(MixedPrecision):
        """Without autocast, whose rounding is not what is tested."""

        def forward_context(self) -> Any:
            return torch.enable_grad()

    def module() -> Any:
        made = make_module("Dion2")
        made.batches[0][overflow_at] = torch.inf
        return made

    def plugin() -> Any:
        return Scaling("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    trained = module()
    trainer = fit(trained, "one", plugins=[plugin()])
    alone = make_model()
    optimizer = make_optimizer(alone, "Dion2")
    bases = [group["lr"] for group in optimizer.param_groups]
    batches = zip(*make_batches(SAMPLES, num_steps=2 * NUM_STEPS), strict=True)
    for number, (x, y) in enumerate(islice(batches, NUM_STEPS)):
        if number != overflow_at:
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * rate(number)
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    try:
        fit(module(), "one", plugins=[plugin()], gradient_clip_val=0.1)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    return largest_difference(whole(trained), alone.state_dict()), trainer.scaler.get_scale(), refusal


def test_a_loss_scaler_leaves_out_the_step_that_overflows() -> None:
    [(error, scale, refusal)] = on_launched_ranks(1, scaled, 2)
    assert error < 1e-12
    assert scale == 2.0**15  # halved once
    assert "gradient clipping" in refusal  # as the document says
