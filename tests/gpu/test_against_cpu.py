"""On a GPU the models compute what they compute on a CPU in fp64: losses, every gradient, optimiser steps, checkpoints.

One rank, for NCCL takes one a GPU, and gloo moves no tensors of one.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.bert import BertForPreTraining
from models.gpt import CausalBatch, Gpt, GptConfig, count_targets, pack_texts
from models.gpt import lay as lay_texts
from models.transformers_causal_lm import PackedCausalLM
from models.vit import Vit, VitConfig, pack_images
from tensor3d import Cube, ExecutionPolicy, MixedPrecisionPolicy, clip_grad_norm_, local
from tensor3d.checkpoint import load, save
from tensor3d.optim import AdamW, GradScaler, Lamb, StableAdamW, decay_groups
from tensor3d.optim.clip_grad import clip_gradients
from tests.models.toy import FAMILIES, lay, totals, toy_config, toy_packs
from tests.programs import ran
from tests.single_device_reference import full

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
VOCAB = 67
# Of the largest gradient of a parameter; of bf16 a step is 2^-8, and layers add up.
TOLERANCE = {None: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
Loss = Callable[[nn.Module, Cube], Tensor]


def bert(cube: Cube, **made: Any) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB), cube, **made)


def bert_modern(cube: Cube) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB, encoder="modern", layers=3, window=4, global_every=3), cube)


def deberta(cube: Cube) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB, **FAMILIES["deberta-v2"], conv_kernel=3), cube)


def mpnet(cube: Cube) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB, **FAMILIES["mpnet"]), cube)


def gte(cube: Cube) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB, **FAMILIES["gte"]), cube)


def gemma(cube: Cube) -> nn.Module:
    return BertForPreTraining(toy_config(VOCAB, **FAMILIES["gemma"]), cube)


def bert_loss(model: nn.Module, cube: Cube) -> Tensor:
    packs = toy_packs(VOCAB, 16)
    loss: Tensor = model(lay(packs, cube).to(cube.device), *totals(packs)).loss
    return loss


def gpt(cube: Cube) -> nn.Module:
    return Gpt(GptConfig(layers=2, hidden=64, heads=4, inner=96, vocab=VOCAB, positions=24, std=0.2), cube)


def llama(cube: Cube) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    return PackedCausalLM(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes)), cube)


def gpt_loss(model: nn.Module, cube: Cube) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (24, 3, 9, 17, 12, 2, 20, 11, 7, 22)]
    packs = pack_texts(texts, 24, 4)
    moved = {name: value.to(cube.device) for name, value in vars(lay_texts(packs, 24, cube)).items()}
    batch = {"batch": CausalBatch(**moved)} if isinstance(model, PackedCausalLM) else moved
    loss: Tensor = model(**batch, targets=count_targets(packs))
    return loss


IMAGES = VitConfig(layers=2, hidden=64, heads=4, inner=96, classes=5, channels=2, patch=4, grid=6, std=0.2)


def vit(cube: Cube) -> nn.Module:
    return Vit(IMAGES, cube)


def vit_loss(model: nn.Module, cube: Cube) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    images = [
        torch.randn(2, 4 * high, 4 * wide, generator=generator) for high, wide in [(2, 3), (4, 4), (1, 1), (5, 2)]
    ]
    labels = torch.randint(0, 5, (len(images),), generator=generator)
    batch = pack_images([image.to(cube.device) for image in images], labels.to(cube.device), cube, IMAGES)
    loss: Tensor = model(batch, len(images)).loss
    return loss


MODELS: dict[str, tuple[Callable[[Cube], nn.Module], Loss]] = {
    "bert": (bert, bert_loss),
    "bert modern": (bert_modern, bert_loss),
    "deberta": (deberta, bert_loss),
    "mpnet": (mpnet, bert_loss),
    "gte": (gte, bert_loss),
    "gemma": (gemma, bert_loss),
    "gpt": (gpt, gpt_loss),
    "llama": (llama, gpt_loss),
    "vit": (vit, vit_loss),
}


def made(make: Callable[[Cube], nn.Module], cube: Cube) -> nn.Module:
    """The same weights on every device and in every type, with vectors that hide nothing."""
    cube.manual_seed(0)
    model = make(cube)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        local(parameter).data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def reference(make: Callable[[Cube], nn.Module], loss_of: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on a CPU in fp64."""
    cube = Cube.single("cpu")
    model = made(make, cube).double()
    loss = loss_of(model, cube)
    loss.backward()
    return loss.detach(), {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def worst_error(model: nn.Module, loss: Tensor, wanted: tuple[Tensor, dict[str, Tensor]], scale: float = 1.0) -> float:
    """Of the loss, and of each gradient by its norm."""
    errors = [float((loss.detach().cpu() - wanted[0]).abs() / wanted[0].abs())]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        got, expected = full(parameter.grad).cpu().double() / scale, wanted[1][name]
        errors.append(float((got - expected).norm() / expected.norm().clamp(min=1e-12)))
    return max(errors)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("compute", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_pass_equals_that_of_a_cpu(name: str, compute: torch.dtype | None, compiled: bool) -> None:
    make, loss_of = MODELS[name]
    cube = Cube.single("cuda", precision=MixedPrecisionPolicy(compute=compute), speed=ExecutionPolicy(compile=compiled))
    model = made(make, cube)
    scale = 64.0 if compute is torch.float16 else 1.0
    loss = loss_of(model, cube)
    (loss * scale).backward()
    error = worst_error(model, loss, reference(make, loss_of), scale)
    assert error < TOLERANCE[compute], f"errs by {error}"


@pytest.mark.parametrize("recompute", ["attention", "layer"])
def test_recomputing_gives_the_same_gradients(recompute: str) -> None:
    cube = Cube.single("cuda", precision=MixedPrecisionPolicy(compute=torch.bfloat16))
    gradients = []
    for option in ("none", recompute):
        model = made(lambda c, o=option: bert(c, recompute=o), cube)  # type: ignore[misc]
        bert_loss(model, cube).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize(
    ("kind", "compiled"), [(AdamW, False), (Lamb, False), (Lamb, True), (StableAdamW, False), (StableAdamW, True)]
)
def test_optimisers_take_the_steps_of_a_cpu(kind: Any, compiled: bool) -> None:
    """Three steps of clipped gradients, fp32 on both."""
    found = []
    for device in ("cpu", "cuda"):
        cube = Cube.single(device, speed=ExecutionPolicy(compile=compiled and device == "cuda"))
        model = made(bert, cube)
        before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        optimizer = kind(decay_groups(model, 0.01), cube, lr=1e-2)
        for _ in range(3):
            bert_loss(model, cube).backward()
            clip_grad_norm_(model.parameters(), 1.0, cube)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append([p.detach().cpu() - b for p, b in zip(model.parameters(), before, strict=True)])
    # Adam's first steps are of the sign of a gradient, whatever its size: where it is all but 0, rounding decides.
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-2


def test_fp16_with_a_scaler_learns() -> None:
    cube = Cube.single("cuda", precision=MixedPrecisionPolicy(compute=torch.float16))
    model = made(bert, cube)
    optimizer, scaler, losses = AdamW(decay_groups(model, 0.0), cube, lr=3e-3), GradScaler(cube), []
    for _ in range(30):
        loss = bert_loss(model, cube)
        scaler.scaled(loss).backward()
        norm = clip_gradients(model.parameters(), 1.0, cube, loss_scale=scaler.scale)
        optimizer.found_inf = norm.found_inf
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.update(norm.found_inf)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses


def test_a_checkpoint_from_a_gpu_loads_to_the_last_bit(tmp_path: Path) -> None:
    cube = Cube.single("cuda")
    model = made(bert, cube)
    optimizer = AdamW(decay_groups(model, 0.01), cube, lr=1e-3)
    bert_loss(model, cube).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    folder = save(tmp_path, 1, model, optimizer, cube, {})
    drawn = torch.rand(8, device="cuda")
    for device in ("cuda", "cpu"):
        other = Cube.single(device)
        twin = bert(other)
        again = AdamW(decay_groups(twin, 0.01), other, lr=1e-3)
        load(folder, twin, again, other)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.detach().cpu(), b.detach().cpu())
        if device == "cuda":
            assert torch.equal(torch.rand(8, device="cuda"), drawn), "the random stream goes on elsewhere"


NCCL = """
import torch, torch.distributed as dist
from tensor3d import Cube
cube = Cube.from_env(1, 1, 1, 1)
assert cube.device == torch.device("cuda", 0), cube.device
assert dist.get_backend() == "nccl", dist.get_backend()
total = torch.ones(4, device=cube.device)
dist.all_reduce(total)
assert total.tolist() == [1.0] * 4
from tests.gpu import test_against_cpu as t
model = t.made(t.bert, cube)
t.bert_loss(model, cube).backward()
torch.cuda.synchronize()
cube.close()
print("done")
"""


def test_nccl_of_one_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    places = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = ran([sys.executable, "-c", NCCL], cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
    assert not dist.is_initialized()
