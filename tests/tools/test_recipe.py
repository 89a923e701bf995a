"""Recipes: every shipped one is valid, and what is wrong with one is told with its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.recipe import Recipe, read_recipe

SHIPPED = sorted((Path(__file__).parents[2] / "launch" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert read_recipe(path).run.steps >= 1


def test_what_a_recipe_leaves_out_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[optimizer]\nlr = 1\n[run]\nsteps = 7\n")
    recipe = read_recipe(path)
    assert (recipe.optimizer.lr, recipe.run.steps, recipe.data) == (1.0, 7, Recipe().data)
    assert isinstance(recipe.optimizer.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\ncapcity = 128", r"unknown key data.capcity. Known here: source, vocab_size,"),
        ("[datta]\ncapacity = 128", r"unknown key datta. Known here: data, model,"),
        ("steps = 5", r"unknown key steps"),
        ("run = 5", r"run must be a table. Got 5"),
        ("[run]\nsteps = '5'", r"run.steps must be of type int. Got '5'"),
        ("[run]\nsteps = 5.0", r"run.steps must be of type int. Got 5.0"),
        ("[run]\nsteps = true", r"run.steps must be of type int. Got True"),
        ("[optimizer]\nlr = 'high'", r"optimizer.lr must be of type float. Got 'high'"),
        ("[model]\npreset = 'huge'", r"model.preset must be of type .*tiny.*. Got 'huge'"),
        ("[model]\nlayers = 'two'", r"model.layers must be of type int. Got 'two'"),
        ("[model]\nheads = 3", r"hidden must divide by heads=3. Got 128"),
        ("[run]\nsteps = 0", r"run.steps must be at least 1. Got 0"),
        ("[optimizer]\nlr = 0", r"optimizer.lr must be above 0 and finite. Got 0.0"),
        ("[optimizer]\nclip = inf", r"optimizer.clip must be above 0 and finite. Got inf"),
        ("[optimizer]\neps = nan", r"optimizer.eps must be at least 0. Got nan"),
        ("[optimizer]\nbeta1 = 1", r"optimizer.beta1 must be at least 0 and below 1. Got 1.0"),
        ("[optimizer]\nwarmup = 1.0", r"optimizer.warmup must be at least 0 and below 1. Got 1.0"),
        ("[data]\nmax_length = 129", r"data.max_length=129 is longer than a pack of data.capacity=128"),
        ("[data\n", r"is not valid TOML"),
    ],
)
def test_a_bad_recipe_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as problem:
        read_recipe(path)
    assert "bad.toml" in str(problem.value)


def test_a_missing_recipe() -> None:
    with pytest.raises(ValueError, match=r"nowhere.toml does not exist"):
        read_recipe(Path("nowhere.toml"))
