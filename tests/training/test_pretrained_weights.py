"""Reading a checkpoint folder, and refusing what is damaged or computed differently."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.training.pretrained.folders import read_config
from analysis.training.pretrained.weights import load_llama, random_llama, save_llama

from .conftest import llama

CONFIG = llama(vocab_size=11, num_layers=2)


@pytest.fixture
def folder(tmp_path):
    save_llama(random_llama(CONFIG, 0, torch.float32), tmp_path)
    return tmp_path


def edit_config(folder, **fields):
    path = folder / "config.json"
    found = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_saved_model_is_read_back(folder):
    model, read = random_llama(CONFIG, 0, torch.float32), load_llama(folder, torch.float32)
    assert read.config == model.config
    assert torch.equal(read.head, model.head) and torch.equal(read.embedding, model.embedding)
    for ours, theirs in zip(model.layers, read.layers, strict=True):
        assert torch.equal(ours.attention_norm, theirs.attention_norm)
        assert torch.equal(ours.mlp_norm, theirs.mlp_norm)
        assert all(torch.equal(w, theirs.groups[n]) for n, w in ours.groups.items())
    assert load_llama(folder, torch.float64).norm.dtype == torch.float64


def test_several_files_and_a_stored_tied_head_are_read(folder):
    edit_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for part, chosen in (("1", names[:5]), ("2", names[5:])):
        kept = {name: tensors[name] for name in chosen}
        save_file(kept, folder / f"model-{part}-of-2.safetensors")
    model = load_llama(folder, torch.float32)
    assert model.head is model.embedding


def test_both_ways_to_write_a_configuration_are_read(folder):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    edit_config(folder, rope_theta=None, rope_parameters=rope)
    assert read_config(folder).rope_theta == 5e5
    edit_config(folder, rope_parameters=None, rope_theta=7, num_key_value_heads=None, head_dim=None)
    config = read_config(folder)
    assert (config.rope_theta, config.num_kv_heads, config.head_dim) == (7.0, 2, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3', only 'llama' is supported"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "type 'llama3' are not supported"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=2"),
        ({"hidden_size": "8"}, "no valid Llama configuration"),
        ({"intermediate_size": 13}, "config.json implies"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"tensor model\.layers\.1\..* is none of a plain Llama's"),
    ],
)
def test_another_architecture_is_refused(folder, fields, message):
    edit_config(folder, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        load_llama(folder, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_bias_is_refused_and_stored_angles_are_not_read(folder):
    angles = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({angles: torch.zeros(2)}))
    load_llama(folder, torch.float32)
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({bias: torch.zeros(8)}))
    with pytest.raises(ValueError, match=rf"tensor {bias} is none of a plain Llama's"):
        load_llama(folder, torch.float32)


def test_missing_and_damaged_files_are_named(folder, tmp_path_factory):
    with pytest.raises(ValueError, match=r"config\.json is missing: give a folder that holds"):
        read_config(tmp_path_factory.mktemp("empty"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_llama(folder, torch.float32)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        load_llama(folder, torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        read_config(folder)
