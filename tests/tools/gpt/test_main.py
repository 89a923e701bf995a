"""tools.gpt: trains on any cube with the same losses, generates the same text from it, and refuses in words."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensor3d import Cube
from tensor3d.data import IndexedDataset, IndexedWriter, SpecialTokens
from tests.ranks import run_ranks
from tests.single_device_reference import name_of, ranks_of
from tests.tools.runs import journal
from tools.gpt.__main__ import main
from tools.gpt.train import GptTrainer, TrainCommand, _corpus, packs_of, texts_of

Shape = tuple[int, int, int, int]
SPECIAL = SpecialTokens(vocab_size=67, pad=0, cls=2, sep=3, mask=4)
STEPS = 6


def training(output: Path, recipe: Path, cube: str = "1x1x1", data: int = 1) -> list[str]:
    text = recipe.parent / "text.txt"
    sizes = ["--vocab-size", "67", "--length", "32", "--batch", "8", "--steps", str(STEPS), "--window", "20"]
    places = ["--output", str(output), "--source", str(text), "--corpus", str(recipe.parent / "gpt-corpus")]
    return ["train", *places, *sizes, "--cube", cube, "--data-parallel", str(data)]


def generating(run: Path, cube: str = "1x1x1", *more: str) -> list[str]:
    return ["generate", str(run), "--prompt", "Cube axis", "--tokens", "12", "--cube", cube, *more]


def said(arguments: list[str]) -> str:
    """What `main` prints, here or on a rank whose process group stands."""
    if torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(arguments) == 0
    return output.getvalue()


def losses(run: Path) -> list[float]:
    lines = journal(run)
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("step", step) for step in range(1, STEPS + 1)),
        ("evaluation", STEPS),
    ]
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one device."""
    folder = tmp_path_factory.mktemp("gpt") / "run"
    told = said(training(folder, recipe))
    assert "held out" in told
    assert f"python -m tools.gpt generate {folder}" in told
    return folder


def corpora_of_hosts(folder: Path, text: Path) -> list[str]:
    """What ranks say whose machines have folders of their own, and the same command."""
    cube, here, told = Cube(data=2), Path.cwd(), []
    try:
        os.chdir(folder / f"host{cube.rank}")
        for corpus in ("alike", "other"):
            try:
                told.append(
                    _corpus(TrainCommand(source=str(text), vocab_size=67, corpus=Path(corpus)), cube).info.source
                )
            except ValueError as refusal:
                told.append(str(refusal))
    finally:
        os.chdir(here)
    return told


@pytest.mark.slow
def test_machines_with_other_corpora_are_told_before_a_step(run: Path, recipe: Path, tmp_path: Path) -> None:
    assert run.is_dir(), "the corpus is prepared"
    for host, corpus in ((host, corpus) for host in ("host0", "host1") for corpus in ("alike", "other")):
        shutil.copytree(recipe.parent / "gpt-corpus", tmp_path / host / corpus)
    changed = tmp_path / "host1/other/corpus.json"
    facts = json.loads(changed.read_text())
    changed.write_text(json.dumps(facts | {"fingerprint": "0" * 32}))
    one, other = run_ranks(2, corpora_of_hosts, tmp_path, recipe.parent / "text.txt")
    assert one == other
    assert not one[0].startswith("the corpus")
    assert one[1].startswith("the corpus in other differs between ranks: rank 1 has 0000000000000000, rank 0 ")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 1, 2, 2)], ids=name_of)
def test_a_run_does_not_depend_on_the_cube(shape: Shape, run: Path, recipe: Path, tmp_path: Path) -> None:
    x, y, z, data = shape
    other = tmp_path / "run"
    first, *others = run_ranks(ranks_of(shape), said, training(other, recipe, f"{x}x{y}x{z}", data))
    assert "held out" in first
    assert set(others) == {""}, "the first rank prints"
    assert losses(other) == pytest.approx(losses(run), abs=1e-3)
    assert said(generating(other)).startswith("Cube axis"), "weights of the cube, on one device"


@pytest.mark.slow
def test_a_cube_tells_the_same_text(run: Path) -> None:
    arguments = generating(run, "1x2x2", "--temperature", "0")
    assert run_ranks(4, said, arguments) == [said(generating(run, "1x1x1", "--temperature", "0")), "", "", ""]


def test_the_loss_falls_and_training_is_deterministic(run: Path, recipe: Path, tmp_path: Path) -> None:
    first = losses(run)
    assert first[0] == pytest.approx(np.log(67), abs=0.3)
    assert first[-2] < first[0] - 0.5
    assert first[-1] < first[0] - 0.3, "held out"
    again = tmp_path / "run"
    said(training(again, recipe))
    assert losses(again) == first


def test_draws_are_those_of_the_seed(run: Path) -> None:
    one, same, other = (said(generating(run, "1x1x1", "--seed", seed)) for seed in ("1", "1", "2"))
    assert one.startswith("Cube axis")
    assert one == same
    assert one != other


# --- refusals ------------------------------------------------------------------------------------------------------


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_a_cube_of_several_processes_is_answered_with_the_command(
    recipe: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = training(tmp_path / "new run", recipe, "2x2x2")
    told = refusal(arguments, capsys)
    assert "the cube needs 8 processes, and this is one alone. Run:\n" in told
    command = "python launch/torchrun.py --standalone --local-addr=127.0.0.1 --nproc-per-node=8 -m tools.gpt train"
    assert f"{command} --output '{tmp_path}/new run'" in told
    assert not (tmp_path / "new run").exists()
    assert "--nproc-per-node=4 -m tools.gpt generate" in refusal(generating(run, "1x2x2"), capsys)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "9", "--data-parallel", "2"], "a global batch of 9 packs does not divide by data=2"),
        (["--cube", "1x3x1"], "heads must divide by y=3. Got 4"),
        (["--cube", "1x8"], "a cube is written XxYxZ"),
        (["--steps", "0"], "steps must be at least 1. Got 0"),
        (["--length", "1"], "length must be at least 2"),
        (["--window", "0"], "window must be at least 1, or None. Got 0"),
        (["--preset", "huge"], "preset must be one of tiny, small. Got 'huge'"),
        (["--lr", "0"], "lr must be above 0"),
        (["--lr", "1e39"], "lr must be at most 3.4e+38"),
        (["--source", "/no/such/text"], "/no/such/text"),
    ],
)
def test_training_that_cannot_be_is_refused(
    more: list[str], message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert message in refusal([*training(output, recipe), *more], capsys)
    assert not output.exists()


def test_a_last_step_that_spoils_the_weights_leaves_no_model(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No loss of a step follows it."""
    told = refusal([*training(tmp_path / "run", recipe), "--steps", "1", "--lr", "1e38"], capsys)
    assert "the held-out loss after step 1 is nan. Lower --lr, which is 1e+38" in told
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_a_run_is_not_overwritten(run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds a run already. Choose another --output" in refusal(training(run, recipe), capsys)


def test_a_run_that_was_broken_off_keeps_nobody_out(
    run: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, seen = tmp_path / "run", list[int]()

    def interrupted(trainer: GptTrainer, *_: Any) -> None:
        seen.append(trainer.state.step)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GptTrainer, "before", interrupted)
        patched.setattr(signal, "signal", lambda *_: None)  # which would have the tests ignore Ctrl-C
        assert main(training(output, recipe)) == 130
    assert (output / "run.json").exists()
    (output / "checkpoints" / "step-00000003.01234567.partial").mkdir(parents=True)  # as a kill in the save leaves it
    said(training(output, recipe))
    assert losses(output) == losses(run)
    assert [path.suffix for path in (output / "checkpoints").iterdir()] == [""]
    # Another tool's run, which has no checkpoint either, is not ours to begin anew.
    (output / "run.json").write_text('{"recipe": {}}')
    shutil.rmtree(output / "checkpoints")
    assert "holds a run already" in refusal(training(output, recipe), capsys)


def test_generation_that_cannot_be_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = generating(run)
    told = refusal(["generate", str(tmp_path / "none"), "--prompt", "A"], capsys)
    assert f"Train one first: python -m tools.gpt train --output {tmp_path}/none" in told
    assert "--prompt is empty" in refusal([*base, "--prompt", " "], capsys)
    assert "must leave room within the model's 32 positions" in refusal([*base, "--prompt", "cube " * 40], capsys)
    assert "tokens must be at least 1. Got 0" in refusal([*base, "--tokens", "0"], capsys)
    assert "temperature must be at least 0" in refusal([*base, "--temperature", "-1"], capsys)
    assert "heads must divide by y=3" in refusal([*base, "--cube", "1x3x1"], capsys)
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    assert "has no checkpoint" in refusal(["generate", str(tmp_path), "--prompt", "A"], capsys)
    (tmp_path / "run.json").write_text('{"model": {"layers": 2}}')
    assert "is not what tools.gpt train writes" in refusal(["generate", str(tmp_path), "--prompt", "A"], capsys)


# --- texts ---------------------------------------------------------------------------------------------------------


def documents(folder: Path) -> IndexedDataset:
    with IndexedWriter(folder / "some", vocab_size=67) as writer:
        writer.add_document([[10, 11], [12]])
        writer.add_document([[20, 21, 22], [23, 24, 25, 26]])
    return IndexedDataset(folder / "some")


def test_documents_are_cut_into_texts(tmp_path: Path) -> None:
    found = documents(tmp_path)
    assert texts_of(found, SPECIAL, 5) == [[2, 10, 11, 12, 3], [2, 20, 21, 22, 23], [24, 25, 26, 3]]
    # A rest of one token has nothing to predict.
    assert texts_of(found, SPECIAL, 4) == [[2, 10, 11, 12], [2, 20, 21, 22], [23, 24, 25, 26]]


def test_every_epoch_has_all_texts_in_an_order_of_its_own() -> None:
    texts = [[number] * (number % 7 + 2) for number in range(300)]
    packs = packs_of(texts, 16, seed=3)
    seen: list[int] = []
    while len(seen) < 15000:
        pack = next(packs)
        assert sum(map(len, pack)) <= 16
        seen += [text[0] for text in pack]
    counts = np.bincount(seen, minlength=300)
    # What is missing from even counts waits, or stands in what is left of the epoch: not 50 times one text.
    assert (counts.max() - counts).sum() < 512 + 300
    first, again, other = (
        [pack for pack, _ in zip(packs_of(texts, 16, seed), range(20), strict=False)] for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
