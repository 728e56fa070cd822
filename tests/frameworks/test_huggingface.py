"""Accelerate and the Trainer of transformers step as a plain loop does; resumed runs have the bits of unbroken ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from dion_core import NorDion2, param_groups_for
from tests.documents import on_launched_ranks
from tests.small_model import make_batches, make_model, make_optimizer

needs_accelerate = pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
needs_trainer = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("transformers")), reason="transformers or accelerate is not installed"
)

NUM_STEPS, SAVED_AT = 6, 3
SAMPLES = 4
WORDS, LENGTH = 64, 8


def rate(step: int) -> float:
    return 1 / (step + 1)


def world() -> Any:
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def whole(model: nn.Module) -> dict[str, Tensor]:
    values = model.state_dict().items()
    return {
        name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in values
    }


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


# --- Accelerate


def accelerator(way: str) -> Any:
    """On a CPU Accelerate shards nothing when it is asked to, but its code for that works there: it is told to."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if way == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    return made


def accelerated(way: str, name: str, folder: str, *, resume: bool = False) -> dict[str, Tensor]:
    """The weights after all steps; where resumed, those after SAVED_AT are loaded into new objects in between."""
    ours = accelerator(way)
    model = make_model()
    optimizer = make_optimizer(model, name, group=world() if way == "ddp" else None)
    scheduler = LambdaLR(optimizer, rate)
    model, optimizer, scheduler = ours.prepare(model, optimizer, scheduler)
    if resume:
        ours.load_state(folder)
    for number, batch in enumerate(zip(*make_batches(SAMPLES, num_steps=2 * NUM_STEPS), strict=True)):
        if resume and number < 2 * SAVED_AT:
            continue
        x, y = (each.chunk(ours.num_processes)[ours.process_index] for each in batch)
        with ours.accumulate(model):
            ours.backward(nn.functional.mse_loss(model(x), y))
            if ours.sync_gradients:
                ours.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 2 * SAVED_AT - 1:
            ours.save_state(folder)
            ours.wait_for_everyone()
    return whole(model)


def alone(name: str, num_processes: int) -> dict[str, Tensor]:
    """One process with the whole batches, without Accelerate, whose schedulers advance once for every process."""
    model = make_model()
    optimizer = make_optimizer(model, name)
    scheduler = LambdaLR(optimizer, rate)
    batches = zip(*make_batches(SAMPLES, num_steps=2 * NUM_STEPS), strict=True)
    for number, (x, y) in enumerate(batches, 1):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(num_processes):
                scheduler.step()
    assert largest_difference(model.state_dict(), make_model().state_dict()) > 1e-3
    return model.state_dict()


def accelerated_twice(way: str, name: str, folder: str) -> tuple[float, float]:
    """The error against one process, and of the resumed run against the unbroken one."""
    unbroken = accelerated(way, name, folder)
    resumed = accelerated(way, name, folder, resume=True)
    return largest_difference(unbroken, alone(name, dist.get_world_size())), largest_difference(resumed, unbroken)


@needs_accelerate
@pytest.mark.parametrize(
    ("way", "name"),
    [("one", "Muon"), ("one", "NorDion2"), ("ddp", "NorDion2"), ("fsdp2", "Dion2"), ("fsdp2", "NorMuon")],
)
def test_accelerate_equals_a_plain_loop_and_resumes(way: str, name: str, tmp_path: Path) -> None:
    for error, resumed in on_launched_ranks(1 if way == "one" else 2, accelerated_twice, way, name, str(tmp_path)):
        assert error < 1e-7  # sums of gradients in another order; the second moment is float32
        assert resumed == 0.0


def scaled() -> tuple[float, bool]:
    """The weights' change in a step whose gradients overflow under a scaler, and whether Accelerate saw it."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator("one")
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(make_optimizer(model, "NorDion2"), scaler=scaler)
    before = whole(model)
    inputs, targets = make_batches(SAMPLES)
    scaler.scale(nn.functional.mse_loss(model(inputs[0] * torch.inf), targets[0])).backward()
    optimizer.step()
    change, seen = largest_difference(whole(model), before), optimizer.step_was_skipped
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(inputs[0]), targets[0])).backward()
    scaler.unscale_(optimizer.optimizer)  # as clipping does
    optimizer.step()
    plain = make_model()
    other = make_optimizer(plain, "NorDion2")
    nn.functional.mse_loss(plain(inputs[0]), targets[0]).backward()
    other.step()
    assert largest_difference(whole(model), whole(plain)) < 1e-12
    return change, seen


@needs_accelerate
def test_a_scaler_of_accelerate_leaves_out_the_step_that_overflows() -> None:
    [(change, seen)] = on_launched_ranks(1, scaled)
    assert change == 0.0
    assert not seen  # as the document says


# --- the Trainer


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=False, **sizes, **heads)).double()


def make_texts() -> Tensor:
    return torch.randint(WORDS, (4 * NUM_STEPS, LENGTH), generator=torch.Generator().manual_seed(5))


def llama_optimizer(model: nn.Module, group: Any) -> NorDion2:
    return NorDion2(param_groups_for(model, lr=0.02), fraction=0.5, group=group)


def train(folder: str, *, create: bool = False, resume: str | None = None, **options: Any) -> Any:
    """A Trainer that has trained, on batches of four texts over all ranks, in order."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

    class Creating(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = llama_optimizer(model or self.model, None if self.args.fsdp else world())
            return self.optimizer

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "max_grad_norm": 0.0}
    settings = {"max_steps": NUM_STEPS, "save_steps": SAVED_AT, "lr_scheduler_type": "constant", **quiet, **options}
    arguments = TrainingArguments(folder, per_device_train_batch_size=4 // dist.get_world_size(), **settings)
    model = make_llama()
    optimizer = None if create else llama_optimizer(model, world())
    scheduler = None if create else LambdaLR(optimizer, rate)
    texts = [{"input_ids": text, "labels": text} for text in make_texts()]
    trainer = Creating(model, arguments, train_dataset=texts, optimizers=(optimizer, scheduler))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def llama_alone(rate_of: Callable[[int], float] = rate) -> dict[str, Tensor]:
    model = make_llama()
    optimizer = llama_optimizer(model, None)
    scheduler = LambdaLR(optimizer, rate_of)
    for batch in make_texts().split(4):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained_and_resumed(folder: str) -> tuple[float, float, float, float]:
    """Errors against a plain loop, of a resumed run, and of a compiled model; the last rate of a created optimizer."""
    trainer = train(folder)
    unbroken = whole(trainer.model)
    error = largest_difference(unbroken, llama_alone())
    resumed = whole(train(folder, resume=str(Path(folder, f"checkpoint-{SAVED_AT}"))).model)
    compiled = train(folder, max_steps=1, torch_compile=True, torch_compile_backend="eager", save_strategy="no")
    plain = train(folder, max_steps=1, save_strategy="no")
    creating = train(folder, create=True, max_steps=2, save_strategy="no", lr_scheduler_type="linear")
    return (
        error,
        largest_difference(resumed, unbroken),
        largest_difference(whole(compiled.model), whole(plain.model)),
        creating.optimizer.param_groups[0]["lr"],
    )


@needs_trainer
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_trainer_equals_a_plain_loop_and_resumes(world_size: int, tmp_path: Path) -> None:
    for error, resumed, compiled, last_rate in on_launched_ranks(world_size, trained_and_resumed, str(tmp_path)):
        assert error < 1e-6  # the Trainer computes losses of ranks in float32
        assert resumed == 0.0
        assert compiled < 1e-12
        assert last_rate == 0.0


FSDP = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


@contextmanager
def told_to_shard() -> Iterator[None]:
    """Accelerate shards on a CPU as it does on GPUs, when it is given the plugin for that."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    start = AcceleratorState.__init__

    def started(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        start(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            kind = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            AcceleratorState._shared_state |= kind

    with patch.object(AcceleratorState, "__init__", started):
        yield


def sharded_and_resumed(folder: str) -> tuple[float, float, bool]:
    """Errors against a plain loop and of a resumed run under FSDP2; whether a Trainer shards without being told to."""
    with told_to_shard():
        trainer = train(folder, create=True, **FSDP)
        assert all(isinstance(each, DTensor) for each in trainer.model.parameters())
        assert {bucket["axis"] for bucket in trainer.optimizer.optimizer.report()["buckets"]} == {"rows"}
        unbroken = whole(trainer.model)
        resumed = whole(train(folder, create=True, resume=str(Path(folder, f"checkpoint-{SAVED_AT}")), **FSDP).model)
    untold = train(folder, create=True, max_steps=1, save_strategy="no", **FSDP)
    error = largest_difference(unbroken, llama_alone(lambda step: 1.0))
    sharded = any(isinstance(each, DTensor) for each in untold.model.parameters())
    return error, largest_difference(resumed, unbroken), sharded


@needs_trainer
def test_the_trainer_with_fsdp2_equals_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    for error, resumed, sharded in on_launched_ranks(2, sharded_and_resumed, str(tmp_path)):
        assert error < 1e-6  # the Trainer computes losses of ranks in float32
        assert resumed == 0.0
        assert not sharded  # as the document says
