"""What a run needs before its first step: the corpus, and plans for its packs."""

from __future__ import annotations

from tqdm import tqdm

from tensor3d import CubeShape
from tools.command import Command, corpus_folder
from tools.corpus.prepare import prepare
from tools.corpus.training import CorpusFacts, TrainingCorpus, is_samples, open_corpus, read_facts
from tools.feed import check_steps, global_batch, pretraining_data, training_source


def prepare_corpus(command: Command, *, shown: bool) -> CorpusFacts:
    """The corpus of the recipe; fast where it is prepared already. With an exchange a machine need not have all shards,
    so a folder that is there is not prepared again. Samples are taken as they are."""
    data, folder = command.settings.data, corpus_folder(command)
    if is_samples(folder) or (command.exchange and folder.is_dir()):
        return read_facts(folder)
    return prepare(
        data.source,
        folder,
        vocab_size=data.vocab_size,
        held_out=data.held_out,
        seed=command.settings.run.seed,
        shards=data.shards,
        progress=shown,
    )


def prepare_packs(command: Command, shape: CubeShape) -> None:
    """Checks what can be known when the corpus is packed, and writes the plan files of the epochs that the run will
    read, if the recipe has a folder for them.

    With an exchange this machine may lack shards; then the ranks check, and plan, for themselves.
    """
    recipe, corpus = command.settings, open_corpus(corpus_folder(command))
    if command.exchange and corpus.missing:
        return
    source = training_source(corpus, recipe, None)
    plan = corpus.plan(recipe.data.packing)
    data = pretraining_data(recipe, source, corpus.special, plan=plan, continuations=corpus.continuations)
    if recipe.data.plans is not None:
        data.epochs.save_plan(0)
    packs = global_batch(recipe.batch, data.packing_factor)
    sizes = (shape.data, shape.x, shape.y, shape.z)
    check_steps(recipe, data, packs, cube_shape=sizes, data_index=0, x_index=0, z_index=0)
    if recipe.data.plans is not None:
        epochs = -(-recipe.run.steps * packs // data.packs_per_epoch)
        for epoch in tqdm(range(1, epochs), desc="plans", unit="epoch", disable=None):
            data.epochs.save_plan(epoch)
        print(f"plans of {epochs} epochs in {recipe.data.plans}")


def load_same_corpus(command: Command, info: CorpusFacts) -> TrainingCorpus:
    """The corpus of this machine. Raises ValueError unless it is the one that rank 0 sees, and the recipe's."""
    folder, data = corpus_folder(command), command.settings.data
    corpus = open_corpus(folder)
    if corpus.info != info:
        raise ValueError(
            f"{folder} is not the corpus that rank 0 sees: it was replaced while this run began, or this machine has "
            "another one. Give each run a --corpus of its own, the same on all machines."
        )
    # With an exchange the folder was taken as it is.
    for name in ("vocab_size", "shards", "held_out"):
        if getattr(info, name) != getattr(data, name):
            raise ValueError(
                f"{folder} was prepared with {name} = {getattr(info, name)}, the recipe says data.{name} = "
                f"{getattr(data, name)}. Prepare it again, or change the recipe."
            )
    return corpus
