"""Reading published checkpoints: families by names, prefixes and layouts; other folders raise a clear error."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder_checkpoints import Original, choices, original
from safetensors.torch import save_file
from transformers import BloomConfig, GPT2Config, GPT2LMHeadModel, MptConfig, MptForCausalLM

from alibi_attn.hf import ALiBiForCausalLM, patch
from alibi_attn.hf.readers import checkpoint_files


def logits(folder: Path, files: Original, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return ALiBiForCausalLM.from_pretrained(folder, **options)(files.numbers["input_ids"]).logits


def assert_refused(folder: Path, message: str, **options: object) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ALiBiForCausalLM.from_pretrained(folder, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "module.model."])
def test_names_may_have_the_prefix_of_a_wrapper(prefix, tmp_path):
    files = original("mpt-grouped")
    expected = logits(files.write(tmp_path / "plain"), files)
    files.weights = {prefix + name: tensor for name, tensor in files.weights.items()}
    assert torch.equal(logits(files.write(tmp_path / "wrapped"), files), expected)


def test_a_model_saved_without_its_head_is_read_where_the_head_is_its_embeddings(tmp_path):
    files = original("jais")
    expected = logits(files.write(tmp_path / "plain"), files)
    files.weights = {name.removeprefix("transformer."): tensor for name, tensor in files.weights.items()}
    assert torch.equal(logits(files.write(tmp_path / "body"), files), expected)
    files = original("baichuan")
    files.weights = {name.removeprefix("model."): w for name, w in files.weights.items() if name != "lm_head.weight"}
    assert_refused(files.write(tmp_path / "headless"), r"the weights lm_head\.weight", normalized_head=False)


def test_every_layout_of_the_same_weights_is_read(tmp_path):
    """MPT with q, k and v in one map, and in a module with norms; Refact with fused keys and values, and fused gates."""
    files = original("mpt-biases")
    expected = logits(files.write(tmp_path / "apart"), files)
    for n in range(2):
        at = f"transformer.blocks.{n}"
        for kind in ("weight", "bias"):
            parts = [files.weights.pop(f"{at}.attn.W{part}.{kind}") for part in "qkv"]
            files.weights[f"{at}.attn.Wqkv.{kind}"] = torch.cat(parts)
    torch.testing.assert_close(logits(files.write(tmp_path / "fused"), files), expected, rtol=1e-5, atol=1e-5)
    inner = ("norm_1", "norm_2", "attn.")
    for name in [name for name in files.weights if name.split(".", 3)[-1].startswith(inner)]:
        head, n, rest = name.rsplit(".blocks.", 1)[0], *name.rsplit(".blocks.", 1)[1].split(".", 1)
        files.weights[f"{head}.blocks.{n}.norm_attn_norm.{rest}"] = files.weights.pop(name)
    torch.testing.assert_close(logits(files.write(tmp_path / "nested"), files), expected, rtol=1e-5, atol=1e-5)

    files = original("refact")
    expected = logits(files.write(tmp_path / "refact"), files)
    for n in range(2):
        for whole, parts in (("attn.kv", ("attn.k", "attn.v")), ("mlp.gate_up_proj", ("mlp.linear_1", "mlp.linear_3"))):
            rows = [files.weights.pop(f"transformer.h.{n}.{part}.weight") for part in parts]
            files.weights[f"transformer.h.{n}.{whole}.weight"] = torch.cat(rows)
    assert torch.equal(logits(files.write(tmp_path / "published"), files), expected)


@torch.no_grad()
def test_an_mpt_of_transformers_is_read_as_patch_computes_it(tmp_path):
    torch.manual_seed(0)
    model = MptForCausalLM(MptConfig(d_model=48, n_layers=2, n_heads=6, max_seq_len=64, vocab_size=60)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 20))
    with patch(model):
        expected = model(ids).logits
    actual = ALiBiForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_weights_whose_layout_is_ours_are_not_copied(tmp_path, monkeypatch):
    states = []
    read = checkpoint_files.read_state
    monkeypatch.setattr(checkpoint_files, "read_state", lambda folder: states.append(read(folder)) or dict(states[0]))
    model = ALiBiForCausalLM.from_pretrained(original("baichuan2").write(tmp_path), normalized_head=True)
    places = {tensor.data_ptr() for tensor in states[0].values()}
    assert {parameter.data_ptr() for parameter in model.parameters()} == places
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_dtypes_are_read(tmp_path):
    folder = original("jais").write(tmp_path)
    for dtype in (torch.bfloat16, "bfloat16"):
        model = ALiBiForCausalLM.from_pretrained(folder, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_refused(folder, "dtype is torch.int8 but must be a floating dtype", dtype=torch.int8)


def test_ends_and_generation_options_come_with_the_folder(tmp_path):
    files = original("baichuan")
    folder = files.write(tmp_path)
    assert ALiBiForCausalLM.from_pretrained(folder, normalized_head=False).generation_config.eos_token_id == 2
    (folder / "generation_config.json").write_text('{"eos_token_id": 5, "max_new_tokens": 7, "user_token_id": 195}')
    options = ALiBiForCausalLM.from_pretrained(folder, normalized_head=False).generation_config
    assert (options.eos_token_id, options.max_new_tokens) == (5, 7)
    (folder / "generation_config.json").write_text("{")
    assert_refused(folder, r"generation_config\.json is invalid", normalized_head=False)


def test_both_baichuans_are_distinguished_by_their_vocabulary(tmp_path):
    files = original("baichuan2")
    assert_refused(
        files.write(tmp_path / "a"),
        "has a vocabulary of 60.*pass normalized_head=False for the first, True for the second",
    )
    for vocabulary, normalized in ((64000, False), (125696, True)):
        files.config["vocab_size"] = vocabulary
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            files.weights[name] = torch.zeros(vocabulary, 48, dtype=torch.bfloat16)
        model = ALiBiForCausalLM.from_pretrained(files.write(tmp_path / str(vocabulary)))
        assert model.config.normalized_head is normalized
    files.config["max_position_embeddings"] = 4096
    assert_refused(files.write(tmp_path / "7b"), "7B Baichuan, with rotary positions")


def lost(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda weights: weights.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda weights: weights.update({name: tensor})


JAIS, BLOCK, SLOPES = "transformer.h.", "transformer.blocks.0.attn.", "transformer.relative_pe.slopes"
WTE = "transformer.wte.weight"
WEIGHTS = [
    ("jais", lost(f"{JAIS}1.ln_2.bias"), r"the weights transformer\.h\.1\.ln_2\.bias"),
    ("jais", lost(SLOPES), r"the weights transformer\.relative_pe\.slopes"),
    ("jais", put("transformer.wpe.weight", torch.ones(4, 48)), r"unexpected weights transformer\.wpe\.weight"),
    ("jais", put(SLOPES, torch.ones(5, 1)), r"slopes of shape \[5, 1\] but its 6 heads need finite numbers \[6, 1\]"),
    ("jais", put(SLOPES, torch.full((6, 1), torch.nan)), r"need finite numbers \[6, 1\]"),
    ("jais", put(f"{JAIS}0.mlp.c_fc.weight", torch.ones(53, 48)), r"\.c_fc\.weight \[53, 48\] .* needs \[48, 53\]"),
    ("jais", put("lm_head.weight", torch.ones(60, 48)), r"tie_word_embeddings but lm_head\.weight is not transformer"),
    ("refact", put(f"{JAIS}0.attn.k.weight", torch.ones(5, 24)), r"q\.weight .*k\.weight \[5, 24\].* \[32, 24\] in"),
    ("mpt-grouped", lost(f"{BLOCK}q_ln.weight"), r"the weights .*attn\.q_ln\.weight"),
    ("mpt-grouped", put(WTE, torch.ones(60, 48).char()), r"holds transformer\.wte\.weight as torch\.int8: quant"),
    ("mpt-grouped", put("transformer.norm_f.weight", torch.ones(())), r"norm_f\.weight \[\] where"),
]


@pytest.mark.parametrize(("name", "damage", "message"), WEIGHTS)
def test_weights_that_do_not_fit_are_named(name, damage, message, tmp_path):
    files = original(name)
    damage(files.weights)
    assert_refused(files.write(tmp_path), message, **choices(name))


MPT, TUNING = original("mpt-grouped").config["attn_config"], {"attn_scale": 0.1}
CONFIGS = [
    ("jais", {"model_type": "llama"}, "names of BTLM or Jais, whose model_type is btlm or jais, but .* 'llama'"),
    ("jais", {"model_type": ["jais"]}, r"config.json is damaged: model_type is \['jais'\] but must be text"),
    ("jais", {"n_head": 5}, "num_attention_heads is 5 but must be a divisor of 48|its 5 heads need"),
    ("jais", {"n_head": "6"}, "config.json has n_head = '6' but only an integer is supported"),
    ("jais", {"n_embd": None}, "config.json has no n_embd"),
    ("jais", {"n_embd": 0}, "hidden_size is 0 but must be a number of at least 1"),
    ("jais", {"n_layer": 10**9}, "has 2 layers but its config says 1000000000"),
    ("jais", {"n_inner": 2**62}, r"has intermediate_size \d+ in its config but no weight that long"),
    ("refact", {"vocab_size": 10**12}, r"has vocab_size \d+ in its config but no weight that long"),
    ("mpt-grouped", {"n_heads": 10**12}, "has n_heads = 1000000000000 but it must divide d_model = 48"),
    ("mpt-grouped", {"head_dim": 16}, "has a head_dim that is not d_model / n_heads"),
    ("jais", {"eos_token_id": "end"}, "config.json is invalid"),
    ("jais", {"activation_function": "gelu_new"}, r"unexpected .*mlp\.c_fc2"),
    ("jais", {"position_embedding_type": "learned"}, "has position_embedding_type = 'learned' but only 'alibi'"),
    ("btlm", {"alibi_scaling": {"type": "ntk", "factor": 2.0}}, "alibi_scaling is .* but must be None"),
    ("mpt-grouped", {"attn_config": {**MPT, "alibi": False}}, "has alibi = false but only an MPT with ALiBi"),
    ("mpt-grouped", {"attn_config": {**MPT, "rope": True}}, "attn_config has rope = True but only False"),
    ("mpt-grouped", {"attn_config": {**MPT, "attn_temperature_tuning": TUNING}}, "has attn_scale = 0.1"),
    ("mpt-grouped", {"attn_config": {**MPT, "kv_n_heads": 4}}, "num_key_value_heads is 4 but must be a divisor of 6"),
    ("mpt-grouped", {"attn_config": {**MPT, "qk_ln": False}}, r"unexpected .*attn\.k_ln\.weight"),
    ("mpt-grouped", {"attn_config": [1]}, r"has attn_config = \[1\] but only an object"),
    ("mpt-grouped", {"no_bias": False}, r"the weights .*attn\.Wqkv\.bias"),
    ("mpt-grouped", {"final_logit_softcapping": 30.0}, "has final_logit_softcapping = 30.0 but only None"),
    ("mpt-grouped", {"norm_type": "batchnorm"}, "has norm_type = 'batchnorm' but only 'low_precision_layernorm' or"),
    ("mpt-biases", {"ffn_config": {"ffn_type": "mb_dmoe"}}, "has ffn_type = 'mb_dmoe' but only 'mptmlp' or 'mptglu'"),
    ("mpt-biases", {"ffn_config": {"ffn_act_fn": {"name": "selu"}}}, "selu.* but its name must be one of gelu, quick"),
]


@pytest.mark.parametrize(("name", "options", "message"), CONFIGS)
def test_configs_that_do_not_fit_are_named(name, options, message, tmp_path):
    files = original(name)
    files.config |= options
    assert_refused(files.write(tmp_path), message)


def test_errors_for_other_models_say_where_they_belong(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)).save_pretrained(tmp_path / "gpt2")
    assert_refused(tmp_path / "gpt2", r"GPT-2 has learned positions.*alibi_attn\.hf\.to_alibi")
    jais = original("jais")
    jais.config["model_type"] = "gpt2"
    assert_refused(
        jais.write(tmp_path / "named"), "names of BTLM or Jais, whose model_type is btlm or jais, but .* 'gpt2'"
    )
    BloomConfig(hidden_size=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    assert_refused(tmp_path / "bloom", r"holds a bloom model.*AutoModelForCausalLM.*alibi_attn\.hf\.patch\(model\)")
    for name, weight in (("bert", "encoder.layer.0.attention.self.Wqkv.weight"), ("other", "layers.0.weight")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({weight: torch.ones(2, 2)}, tmp_path / name / "model.safetensors")
    assert_refused(tmp_path / "bert", r"holds an encoder \(MosaicBERT or DNABERT-2\).*alibi embed")
    assert_refused(
        tmp_path / "other", r"hold a checkpoint of Baichuan-13B, BTLM or Jais, Replit, MPT, Refact.*are layers\.0"
    )
    assert_refused(
        original("jais").write(tmp_path / "jais"), "normalized_head is only for Baichuan", normalized_head=True
    )
    with pytest.raises(TypeError, match="from_pretrained accepts device_map only for folders"):
        ALiBiForCausalLM.from_pretrained(tmp_path / "jais", device_map="auto")
    ALiBiForCausalLM.from_pretrained(tmp_path / "jais", trust_remote_code=True, revision="main")  # a common call
    with pytest.raises(FileNotFoundError, match="does not exist; pass the folder"):
        ALiBiForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_wrong_options_for_folders_that_we_wrote_are_refused(tmp_path):
    """By their options; `test_loading.py` damages the files."""
    model = ALiBiForCausalLM.from_pretrained(original("mpt-grouped").write(tmp_path / "theirs"))
    model.save_pretrained(tmp_path / "ours")
    assert_refused(tmp_path / "ours", "was written by save_pretrained; omit it", normalized_head=True)
    assert_refused(tmp_path / "ours", "numerics is 'rounded' but must be one of", numerics="rounded")
