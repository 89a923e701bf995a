"""ViT on a cube equals ViT on one device, which equals one in plain PyTorch with a convolution; it learns shapes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.vit import PRESETS, Vit, VitConfig, cut_patches, pack_images
from tensor3d import Cube, local_shard
from tests.ranks import run_ranks
from tests.single_device_reference import FOUR_SHAPES, error, gradient_errors, make_twins, ranks_of, worst

Shape = tuple[int, int, int, int]
# (height, width) in patches: squares, strips, and one patch alone.
GRIDS = [(2, 3), (4, 4), (1, 1), (5, 2), (3, 3), (1, 6), (2, 2), (4, 3)]


def config(**changes: int) -> VitConfig:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "inner": 48, "classes": 5, "channels": 2, "patch": 4, "grid": 6}
    return VitConfig(**{**sizes, **changes}, std=0.2)


def images() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(2, 4 * high, 4 * wide, generator=generator) for high, wide in GRIDS]
    return made, torch.randint(0, 5, (len(made),), generator=generator)


def run(model: nn.Module, cube: Cube, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """Loss and count of all images, on any cube."""
    made, labels = images()
    batch = pack_images(local_shard(made, cube), local_shard(labels, cube), cube, config(), capacity)
    output = model(batch, len(made))
    output.loss.backward()
    return output.loss, output.correct


# --- on the cube -----------------------------------------------------------------------------------------------------


def loss_and_gradients(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, model, single, twin = make_twins(lambda c: Vit(config(), c), shape)
    # Ten slots for each rank's pack: the same black square in each, on any cube.
    ours, theirs = model.example(10 * cube.shape.planes * cube.shape.z), twin.example(10)  # type: ignore[operator]
    errors = {"example": error(model(**ours).loss, twin(**theirs).loss)}
    (loss, correct), (wanted, wanted_correct) = run(model, cube), run(twin, single)
    errors |= {"loss": error(loss, wanted), "correct": error(correct, wanted_correct)}
    return errors | gradient_errors(model, twin)


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_parity(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), loss_and_gradients, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.usefixtures("fp64")
def test_packs_change_nothing() -> None:
    """One image a pack, as many as there are, or all in one."""
    cube, model, _, twin = make_twins(lambda c: Vit(config(), c), (1, 1, 1, 1))
    (loss, correct), (wanted, wanted_correct) = run(model, cube, capacity=17), run(twin, cube)
    errors = gradient_errors(model, twin) | {"loss": error(loss, wanted)}
    assert torch.equal(correct, wanted_correct)
    assert max(errors.values()) <= 1e-9, errors


# --- in plain PyTorch ------------------------------------------------------------------------------------------------


class PlainVit(nn.Module):
    """From PyTorch's own modules, one image at a time."""

    def __init__(self, sizes: VitConfig) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(sizes.channels, sizes.hidden, sizes.patch, stride=sizes.patch)
        self.rows = nn.Parameter(torch.empty(sizes.grid, sizes.hidden))
        self.columns = nn.Parameter(torch.empty(sizes.grid, sizes.hidden))
        self.class_token = nn.Parameter(torch.empty(sizes.hidden))
        layer = nn.TransformerEncoderLayer(
            sizes.hidden, sizes.heads, sizes.inner or 0, 0.0, "gelu", sizes.eps, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(sizes.hidden, sizes.eps)
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, image: Tensor) -> Tensor:
        cut = self.convolution(image.unsqueeze(0))[0]  # (hidden, high, wide)
        places = self.rows[: cut.shape[1], None] + self.columns[None, : cut.shape[2]]
        tokens = cut.permute(1, 2, 0) + places
        sequence = torch.cat([self.class_token.unsqueeze(0), tokens.flatten(0, 1)])
        result: Tensor = self.head(self.encoder(sequence.unsqueeze(0))[0, 0])
        return result


# A layer's parameters: those of `Vit` and those of PyTorch's encoder.
LAYER = {
    "attention.qkv": "self_attn.in_proj_",
    "attention.out": "self_attn.out_proj.",
    "attention_norm": "norm1.",
    "mlp.up": "linear1.",
    "mlp.down": "linear2.",
    "mlp_norm": "norm2.",
}


def pairs(sizes: VitConfig) -> dict[str, str]:
    """Names of `Vit`'s parameters to those of `PlainVit`."""
    modules = {"embeddings.patches": "convolution.", "final_norm": "encoder.norm.", "head": "head."}
    for number in range(sizes.layers):
        modules |= {f"layers.{number}.{ours}": f"encoder.layers.{number}.{theirs}" for ours, theirs in LAYER.items()}
    both = {f"{ours}.{kind}": f"{theirs}{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}
    tables = {"embeddings.rows.weight": "rows", "embeddings.columns.weight": "columns"}
    return both | tables | {"embeddings.class_token": "class_token"}


def as_plain(name: str, tensor: Tensor, sizes: VitConfig) -> Tensor:
    """A parameter of `Vit` as PyTorch orders it: a filter's pixels apart; q, k and v outside of the heads."""
    if name == "embeddings.patches.weight":
        return tensor.view(sizes.hidden, sizes.channels, sizes.patch, sizes.patch)
    if ".qkv." in name:
        apart = tensor.view(sizes.heads, 3, sizes.hidden // sizes.heads, *tensor.shape[1:])
        return apart.transpose(0, 1).reshape(tensor.shape)
    return tensor


@pytest.mark.usefixtures("fp64")
def test_equals_plain_pytorch() -> None:
    cube, model, _, _ = make_twins(lambda c: Vit(config(), c), (1, 1, 1, 1))
    plain, ours = PlainVit(config()), dict(model.named_parameters())
    theirs = dict(plain.named_parameters())
    assert {pairs(config())[name] for name in ours} == theirs.keys()
    for name, parameter in ours.items():
        theirs[pairs(config())[name]].data.copy_(as_plain(name, parameter.data, config()))
    loss, correct = run(model, cube)
    made, labels = images()
    logits = torch.stack([plain(image) for image in made])
    wanted = F.cross_entropy(logits, labels)
    wanted.backward()
    errors = {"loss": error(loss, wanted)}
    for name, parameter in ours.items():
        assert parameter.grad is not None
        gradient = theirs[pairs(config())[name]].grad
        assert gradient is not None
        errors[name] = error(as_plain(name, parameter.grad, config()), gradient, name)
    assert max(errors.values()) <= 1e-9, errors
    assert correct == (logits.argmax(1) == labels).sum()


# --- it learns -------------------------------------------------------------------------------------------------------


def drawn(count: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Lying bars, standing bars and crosses of both, anywhere in images of 12 to 24 pixels a side, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    labels = torch.randint(0, 3, (count,), generator=generator)
    made = []
    for label in labels.tolist():
        high, wide, reach = 4 * number(3, 6), 4 * number(3, 6), number(4, 5)
        y = (torch.arange(high)[:, None] - number(reach, high - 1 - reach)).abs()
        x = (torch.arange(wide)[None, :] - number(reach, wide - 1 - reach)).abs()
        lying, standing = (y <= 1) & (x <= reach), (x <= 1) & (y <= reach)
        shape = [lying, standing, lying | standing][label]
        made.append((shape.float() + 0.1 * torch.randn(high, wide, generator=generator)).unsqueeze(0))
    return made, labels


@pytest.mark.slow
def test_learns_shapes() -> None:
    sizes = VitConfig(layers=1, hidden=32, heads=4, inner=64, classes=3, channels=1, patch=4, grid=6, std=0.1)
    cube = Cube.single()
    cube.manual_seed(1)
    model = Vit(sizes, cube)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(80):
        made, labels = drawn(32, seed=step)
        output = model(pack_images(made, labels, cube, sizes), len(made))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    made, labels = drawn(150, seed=10_000)  # none of them seen
    with torch.no_grad():
        output = model(pack_images(made, labels, cube, sizes), len(made))
    assert output.correct >= 110, f"{int(output.correct)} of 150 right, loss {float(output.loss):.3f}"


# --- batches ---------------------------------------------------------------------------------------------------------


def test_patches_go_row_by_row() -> None:
    image = torch.arange(32).view(2, 4, 4)
    assert cut_patches(image, 2)[1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]
    assert torch.equal(cut_patches(image, 4)[0], torch.arange(32))


def test_two_images_by_eye() -> None:
    """1x2 and 2x1 patches of one pixel: two class tokens, four patches."""
    sizes = config(channels=1, patch=1)
    made = [torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0], [4.0]]])]
    batch = pack_images(made, torch.tensor([4, 2]), Cube.single(), sizes, capacity=4)
    assert batch.patches.flatten().tolist() == [0, 1, 2, 0, 0, 3, 4, 0]
    assert batch.row_numbers.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert batch.column_numbers.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert batch.is_class.nonzero().flatten().tolist() == batch.first.tolist() == [0, 4]
    assert (batch.sequences.lengths, batch.labels.tolist()) == ((3, 1, 3, 1), [4, 2])


@pytest.mark.parametrize(("tokens", "lengths"), [(2, (2,)), (37, (37,)), (80, (37, 37, 6))])
def test_example(tokens: int, lengths: tuple[int, ...]) -> None:
    model = Vit(config(), Cube.single())
    example = model.example(tokens)
    assert example["batch"].patches.shape == (tokens, 32)
    assert example["batch"].sequences.lengths == lengths
    assert model(**example).correct in (0, example["images"]), "all images are the same"


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        (torch.zeros(3, 8, 8), 0, r"\(2, height, width\).* Got \(3, 8, 8\) for image 1"),
        (torch.zeros(2, 8, 9), 0, r"patch of 4 pixels. Got \(2, 8, 9\) for image 1"),
        (torch.zeros(8, 8), 0, r"Got \(8, 8\) for image 1"),
        (torch.zeros(2, 28, 8), 0, r"= \b24\b.*\(2, 28, 8\).*image 1"),
        (torch.zeros(2, 0, 8), 0, r"at least 4 and .* Got \(2, 0, 8\) for image 1"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), 0, "floating.*torch.uint8.*image 1"),
        (torch.zeros(2, 8, 8), 5, "below 5. Got values from 0 to 5"),
        (torch.zeros(2, 8, 8), 0.5, "labels must be whole numbers, of type int64. Got torch.float32."),
        (None, 0, r"Got 1 images and labels of shape \(2,\)"),
    ],
)
def test_refusals(image: Tensor | None, label: float, message: str) -> None:
    made = [torch.zeros(2, 8, 8)] + ([] if image is None else [image])
    with pytest.raises(ValueError, match=message):
        pack_images(made, torch.tensor([0, label]), Cube.single(), config())


def test_an_image_beyond_the_capacity_is_named() -> None:
    made = [torch.zeros(2, 8, 8), torch.zeros(2, 12, 8)]
    with pytest.raises(ValueError, match=r"image 1 of shape \(2, 12, 8\) has 7 tokens .*capacity of 6. Scale it"):
        pack_images(made, torch.tensor([0, 1]), Cube.single(), config(), capacity=6)


def _bad_images_of_one_plane() -> tuple[list[str], list[float], bool]:
    """What is wrong with the second rank's images: a label, a side, a type, too many tokens, none at all."""
    cube = Cube(1, 1, 1, data=2)
    cube.manual_seed(0)
    model = Vit(config(), cube)
    good = [torch.ones(2, 8, 8)], torch.tensor([0])
    bad = {
        "label": (good[0], torch.tensor([5])),
        "side": ([torch.ones(2, 8, 9)], good[1]),
        "type": ([torch.ones(2, 8, 8, dtype=torch.uint8)], good[1]),
        "capacity": ([torch.ones(2, 12, 12)], good[1]),
        "none": ([], good[1][:0]),
    }
    messages, losses = [], []
    for images, labels in bad.values():
        batch = pack_images(*((images, labels) if cube.rank == 1 else good), cube, config(), capacity=6)
        loss = model(batch, 2).loss
        losses.append(loss.item())
        try:
            loss.backward()
        except ValueError as refusal:
            messages.append(str(refusal))
        cube.ledger.discard()
        model.zero_grad()
    try:
        with torch.no_grad():
            pack_images(*bad["label"], cube, config())
    except ValueError as refusal:
        messages.append(str(refusal))
    loss = model(pack_images(*good, cube, config(), capacity=6), 2).loss
    loss.backward()
    return messages, losses, math.isfinite(loss.item())


def test_bad_images_of_one_plane_are_refused_on_every_rank() -> None:
    """The others have good ones, and would wait for a rank that stops where they are packed."""
    one, other = run_ranks(2, _bad_images_of_one_plane, timeout=20)
    messages, losses, good_again = one
    assert messages == other[0]
    wanted = (
        "rank 1: labels must be at least 0 and below 5",
        "rank 1: images must have the shape (2, height, width)",
        "rank 1: images must be of a floating type",
        "rank 1: image 0 of shape (2, 12, 12) has 10 tokens",
        "rank 1: each image needs a label, and a plane an image",
        "labels must be at least 0 and below 5",  # without gradients, on either for itself
    )
    assert len(messages) == len(wanted)
    for message, begin in zip(messages, wanted, strict=True):
        assert message.startswith(begin)
    assert all(map(math.isnan, losses + other[1]))
    assert good_again
    assert other[2]


def test_a_step_without_images_is_refused() -> None:
    model = Vit(config(), Cube.single())
    with pytest.raises(ValueError, match=r"images must be at least 1, those of a step\. Got 0"):
        model(**{**model.example(8), "images": 0})


def test_tokens_of_an_example_divide() -> None:
    with pytest.raises(ValueError, match=r"\b1\b.*data\*x\*z = \b1\b"):
        Vit(config(), Cube.single()).example(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 0}, "patch must be at least 1"),
        ({"heads": 3}, "divide by heads=3"),
        ({"inner": 0}, "inner must be"),
        ({"eps": math.nan}, "eps must be above 0 and finite. Got nan"),
    ],
)
def test_config_refuses(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 5.7), ("small", 22.1)])
def test_presets_have_the_published_sizes(preset: str, millions: float) -> None:
    """Touvron et al. 2021, table 1. Their position table has a row for each patch, which is some thousandths more."""
    model = Vit(PRESETS[preset], Cube.single())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert math.isclose(count / 1e6, millions, rel_tol=0.01)
