"""Folders of Jina's third embedding model, NomicBERT and GTE: published settings, those of their authors' own code and
the names of tensors that it had, what is refused by name, and how far dropout goes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.bert import BertConfig, BertModel, export_huggingface, open_weights
from models.bert.cost_model.param_shapes import parameters
from models.bert.huggingface.architectures import ARCHITECTURES
from models.bert.huggingface.config import CONFIG, config_from, settings_of
from models.bert.model import rotary_layer
from tensor3d import Cube, GatedMLP3D
from tensor3d.ops.rotary import frequencies
from tests.models.bert.huggingface.families import OURS, check_bits_on_a_cube, drawn
from tests.models.bert.huggingface.subject import same, saved, values
from tests.models.toy import Shape

transformers = pytest.importorskip("transformers")

ONE: Shape = (1, 1, 1, 1)
WITH_ALL = pytest.mark.skipif(not hasattr(transformers, "GteConfig"), reason="this version of transformers has no GTE")
# What the config.json of published models says, without what is of no use here: of Jina's as the library writes it, of
# NomicBERT and of GTE as their authors' code did.
JINA: dict[str, Any] = {
    **{"architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3", "vocab_size": 250002},
    **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "type_vocab_size": 1},
    **{"initializer_range": 0.02, "layer_norm_eps": 1e-5, "max_position_embeddings": 8194, "pad_token_id": 1},
    "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
}
NOMIC: dict[str, Any] = {
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu"},
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "causal": False, "initializer_range": 0.02},
    **{"layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False},
    **{"n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "parallel_block": False},
    **{"prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0},
    **{"rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None},
    **{"type_vocab_size": 2, "use_rms_norm": False, "vocab_size": 30528, "bos_token_id": None},
}
GTE: dict[str, Any] = {
    **{"architectures": ["NewModel", "NewForTokenClassification"], "model_type": "new", "vocab_size": 250048},
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    **{"attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "hidden_act": "gelu"},
    **{"hidden_dropout_prob": 0.1, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm"},
    **{"max_position_embeddings": 8192, "pack_qkv": True, "pad_token_id": 1, "position_embedding_type": "rope"},
    **{"rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "type_vocab_size": 1},
}
SIZES: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "inner": 3072}
JINA_CONFIG = BertConfig(
    **{"layers": 24, "hidden": 1024, "heads": 16, "inner": 4096, "vocab": 250002, "positions": 8194},  # type: ignore[arg-type]
    **{"family": "jina_embeddings_v3", "types": 1, "eps": 1e-5},  # type: ignore[arg-type]
)
NOMIC_CONFIG = BertConfig(
    **{**SIZES, "vocab": 30528, "positions": 2048, "family": "nomic_bert", "activation": "silu"},
    **{"dropout": 0.0, "attention_dropout": 0.0},  # type: ignore[arg-type]
)
GTE_CONFIG = BertConfig(
    **{**SIZES, "vocab": 250048, "positions": 8192, "family": "gte", "types": 1, "attention_dropout": 0.0},
    rotary_factor=8 ** (2 / 64),
)
PUBLISHED = [(JINA, JINA_CONFIG), (NOMIC, NOMIC_CONFIG), (GTE, GTE_CONFIG)]
FAMILIES = [config.family for _, config in PUBLISHED]


@pytest.mark.parametrize(("settings", "config"), PUBLISHED, ids=FAMILIES)
def test_the_published_settings_are_read_and_written_as_the_library_has_them(
    settings: dict[str, Any], config: BertConfig
) -> None:
    assert config_from(settings, Path(CONFIG)) == config
    for found in (settings, None):
        written = settings_of(config, f"{ARCHITECTURES[config.family].classes}Model", "fp32", found=found)
        assert config_from(written, Path(CONFIG)) == config
        assert written["model_type"] == config.family
        assert written["pad_token_id"] == (0 if config.family == "nomic_bert" else 1)
        assert written["rope_parameters"]["rope_theta"] == config.rotary_base_of(0)
        assert not {"auto_map", "n_embd", "rope_scaling", "rope_theta", "rotary_emb_base"} & written.keys()


@pytest.mark.parametrize(
    ("config", "size"),
    [(JINA_CONFIG, 559_616_146), (NOMIC_CONFIG, 137_354_304), (GTE_CONFIG, 306_210_496)],
    ids=FAMILIES,
)
def test_the_published_sizes(config: BertConfig, size: int) -> None:
    """Weights of JinaEmbeddingsV3ForMaskedLM, NomicBertForMaskedLM and GteForMaskedLM of the transformers library."""
    assert sum(each.elements for each in parameters(replace(config, next_sentence=False))) == size


@WITH_ALL
def test_an_xlm_roberta_with_rotary_positions_is_jinas(tmp_path: Path) -> None:
    """As its authors' files call it; of adapters beside its weights the error says what to do."""
    saved(tmp_path, "JinaEmbeddingsV3Model", **drawn("JinaEmbeddingsV3", "Model", ONE, 0))
    told = json.loads((tmp_path / CONFIG).read_text())
    (base,) = (told.pop("rope_parameters")["rope_theta"],)
    told |= {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": base}
    (tmp_path / CONFIG).write_text(json.dumps({**told, "architectures": ["XLMRobertaModel"], "lora_adaptations": None}))
    path = tmp_path / "model.safetensors"
    tensors = authors_names(load_file(path), "JinaEmbeddingsV3", "roberta.")
    save_file(tensors, path, metadata={"format": "pt"})
    config = open_weights(tmp_path).config
    assert (config.family, config.rotary_base_of(0), config.position_rows) == ("jina_embeddings_v3", base, 0)
    name = next(name for name in tensors if name.endswith("0.mixer.Wqkv.weight"))
    tensors[f"{name.removesuffix('weight')}parametrizations.weight.0.lora_A"] = torch.ones(5, 4)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lora_A\. Adapters \(LoRA and the like\) .*merge them into its weights"):
        open_weights(tmp_path)


def test_the_waves_that_gtes_authors_have() -> None:
    """Their base times the factor, and what comes out divided by the factor's 2/d-th power."""
    config = config_from(GTE, Path(CONFIG))
    assert config.rotary_base_of(0) == 160_000
    wanted = 1.0 / (20_000 * 8.0) ** (torch.arange(0, 64, 2) / 64) / 8.0 ** (2 / 64)
    found = frequencies(config.rotary_base_of(0), 64, config.rotary_factor, device=torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    attention: Any = rotary_layer(replace(config, hidden=128, heads=2), Cube.single(), 0).attention
    assert (attention.rotary_base, attention.rotary_factor) == (160_000, config.rotary_factor)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("jina", {"position_embedding_type": "absolute"}, "position_embedding_type must be 'rotary', .*Got 'absolute'"),
        ("jina", {"rotary_emb_base": 10000.0}, "rotary_emb_base 10000 and rope_parameters 20000 contradict"),
        (
            "jina",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "must be 'default', 'linear', .*Got 'yarn'",
        ),
        ("jina", {"rope_parameters": {"rope_type": "linear"}}, "factor of rope_parameters must be above 0 .*Got 0"),
        ("nomic", {"prenorm": True}, "prenorm must be False, for there are LayerNorms after its blocks. Got True"),
        ("nomic", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be 1.0"),
        ("nomic", {"rotary_scaling_factor": 2}, "rotary_scaling_factor must be None, for positions beyond"),
        ("nomic", {"num_experts": 8}, "num_experts must be 0, for MLPs have no experts here. Got 8"),
        ("nomic", {"mlp_fc1_bias": True}, "mlp_fc1_bias must be False"),
        ("nomic", {"activation_function": "gelu"}, "must be one of swiglu, geglu, for its MLP has a gate. Got 'gelu'"),
        ("nomic", {"hidden_size": 512}, "n_embd 768 and hidden_size 512 contradict"),
        ("nomic", {"embd_pdrop": 0.1}, "embd_pdrop 0.1 and hidden_dropout_prob 0.0 contradict"),
        ("nomic", {"n_layer": None}, "has no num_hidden_layers"),
        ("nomic", {"head_dim": 32}, "head_dim must be hidden_size / num_attention_heads = 64. Got 32"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type must be 'layer_norm'"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type must be 'rope'"),
        ("gte", {"hidden_act": "relu"}, "family=\"gte\" has a gate of silu or gelu. Got hidden_act='relu'"),
        (
            "gte",
            {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}},
            "mixed_b of rope_scaling must be null",
        ),
        ("gte", {"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "Got 'dynamic'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale must be False"),
    ],
    ids=str,
)
def test_what_they_do_not_have_here_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    settings = {"jina": JINA, "nomic": NOMIC, "gte": GTE}[family]
    with pytest.raises(ValueError, match=message):
        config_from(settings | changes, Path(CONFIG))


_OF_LAYERS = {
    "NomicBert": {
        **{"self_attn.Wqkv": "attn.Wqkv", "self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11"},
        **{"mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2"},
        **{"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"},
    },
    "JinaEmbeddingsV3": {
        **{"self_attn.Wqkv": "mixer.Wqkv", "self_attn.o_proj": "mixer.out_proj"},
        **{"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"},
    },
    "Gte": {
        **{"self_attn.Wqkv": "attention.qkv_proj", "self_attn.o_proj": "attention.o_proj"},
        **{"post_attention_layernorm": "attn_ln", "post_mlp_layernorm": "mlp_ln"},
    },
}


def authors_names(tensors: dict[str, Tensor], family: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of a model of the library as its authors' files have them."""
    found: dict[str, Tensor] = {}
    layers = "encoder.layer." if family == "Gte" else "encoder.layers."
    for name, value in tensors.items():
        new = re.sub(r"^(nomic_bert|gte|roberta)\.", "", name)
        if ".q_proj." in new or (family == "Gte" and ".up_proj." in new):
            others = ("k_proj", "v_proj") if ".q_proj." in new else ("gate_proj",)
            first = "q_proj" if ".q_proj." in new else "up_proj"
            value = torch.cat([value, *(tensors[name.replace(first, each)] for each in others)])
            new = new.replace("q_proj", "Wqkv").replace("up_proj", "up_gate_proj")
        elif re.search(r"\.(k_proj|v_proj)\.", new) or (family == "Gte" and ".gate_proj." in new):
            continue
        for part, own in _OF_LAYERS[family].items():
            new = new.replace(f".{part}.", f".{own}.")
        new = re.sub(r"^layers\.", layers, new)
        if family != "Gte":
            new = new.replace("embeddings.LayerNorm.", "emb_ln.")
        of_head = new.startswith(("cls.", "lm_head.", "classifier."))
        found[new if of_head else f"{prefix}{new}"] = value.contiguous()
    return found


@WITH_ALL
@pytest.mark.parametrize(
    ("family", "kind", "prefix"),
    [
        ("NomicBert", "Model", ""),
        ("NomicBert", "ForMaskedLM", "bert."),
        ("Gte", "Model", ""),
        ("Gte", "ForMaskedLM", "new."),
        ("JinaEmbeddingsV3", "ForMaskedLM", "roberta."),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not in the folder, so as initialised")
def test_files_of_their_authors_are_the_same_model(tmp_path: Path, family: str, kind: str, prefix: str) -> None:
    cube = Cube.single()
    twin = saved(tmp_path, f"{family}{kind}", **drawn(family, kind, ONE, 0))
    cube.manual_seed(0)
    theirs = values(OURS[kind].from_pretrained(tmp_path, cube))
    path = tmp_path / "model.safetensors"
    renamed = authors_names(load_file(path), family, prefix)
    assert sum(name.endswith((".Wqkv.weight", ".qkv_proj.weight")) for name in renamed) == twin.config.num_hidden_layers
    save_file(renamed, path, metadata={"format": "pt"})
    cube.manual_seed(0)
    assert same(values(OURS[kind].from_pretrained(tmp_path, cube)), theirs)
    if prefix != "bert.":  # which NomicBERT's authors have beside a head, and the library does not know
        again = getattr(transformers, f"{family}{kind}").from_pretrained(tmp_path)
        assert same(dict(again.state_dict()), dict(twin.state_dict()))


@WITH_ALL
@pytest.mark.slow
@pytest.mark.parametrize("family", ["NomicBert", "Gte"])
def test_bits_on_cubes(tmp_path: Path, family: str) -> None:
    check_bits_on_a_cube(tmp_path, family, (2, 2, 2, 1))


@WITH_ALL
def test_biases_that_none_of_them_has(tmp_path: Path) -> None:
    for family, more in (("NomicBert", "layers.0.self_attn.q_proj.bias"), ("Gte", "layers.0.mlp.gate_proj.bias")):
        saved(tmp_path / family, f"{family}Model", **drawn(family, "Model", ONE, 0))
        path = tmp_path / family / "model.safetensors"
        save_file({**load_file(path), more: torch.ones(3)}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"has tensors in its encoder that no .* has: {re.escape(more)}"):
            open_weights(path.parent)


def test_gte_drops_out_behind_its_gate_and_nomicbert_does_not() -> None:
    """As the library does (`GteMLP`, `NomicBertMLP`)."""
    cube = Cube.single()
    for config, wanted in ((GTE_CONFIG, 0.1), (NOMIC_CONFIG, 0.0)):
        mlp = rotary_layer(replace(config, hidden=128, heads=2), cube, 0).mlp
        assert isinstance(mlp, GatedMLP3D)
        assert (mlp.dropout.p, mlp.down.bias is not None, mlp.gate_up.bias) == (wanted, wanted > 0, None)


def test_an_exported_folder_says_all_dropout(tmp_path: Path) -> None:
    cube = Cube.single()
    for config in (GTE_CONFIG, NOMIC_CONFIG, JINA_CONFIG):
        small = replace(config, layers=1, hidden=32, heads=4, inner=48, vocab=67, dropout=0.3, attention_dropout=0.2)
        written = export_huggingface(BertModel(small, cube), cube, tmp_path / config.family)
        assert written.note is None or "pooler" in written.note
        settings = json.loads((tmp_path / config.family / CONFIG).read_text())
        assert (settings["hidden_dropout_prob"], settings["attention_probs_dropout_prob"]) == (0.3, 0.2)
        assert config_from(settings, Path(CONFIG)) == small
