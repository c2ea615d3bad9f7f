"""Reading a long text into a cache, in memory or in files: same bits, resumable, only with the same model and text."""

import copy
import sys

import pytest
import torch
from kills import killed_at_random
from refusals import assert_refused

from alibi_attn.attention.run import decoding, near_keys
from alibi_attn.hf import ALiBiCache, patch, read
from alibi_attn.hf.patching import reading

in_files = pytest.mark.skipif(sys.platform == "win32", reason="caches in files need Linux or macOS")
pytestmark = [in_files, pytest.mark.usefixtures("no_gradients")]


OTHER_MODEL = "was written by a model with other weights, slopes or layers"
UNKNOWN = "whose model and token ids are known can be saved"


class StoppedError(Exception):
    """Interrupts a forward pass."""


@pytest.fixture
def small(monkeypatch):
    """Chunks of 64 tokens, and cached keys are read within reach from the first chunks on."""
    monkeypatch.setattr(reading, "_CHUNK", 64)
    monkeypatch.setattr(decoding, "LONG", 0)
    monkeypatch.setattr(decoding, "CHUNKS", 2)
    monkeypatch.setattr(near_keys, "FEW", 32)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon new", "ours"])
def test_reading_into_files_gives_the_bits_of_memory_and_of_a_full_pass(family, small, build_patched, tokens, tmp_path):
    model, ids = build_patched(family), tokens(2, 300)
    caches, losses = [ALiBiCache(), ALiBiCache(tmp_path / "cache")], [[], []]
    both = zip(caches, (ids, ids.int()), losses, strict=True)
    last = [read(model, one, cache, losses=found.append) for cache, one, found in both]
    losses = [torch.cat(parts, dim=1) for parts in losses]
    assert torch.equal(*last)
    assert torch.equal(*losses)
    full = model(ids, use_cache=False).logits
    torch.testing.assert_close(last[0], full[:, -1], rtol=1e-4, atol=1e-4)
    expected = torch.nn.functional.cross_entropy(full[:, :-1].mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(losses[0], expected, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    generated = model.generate(ids, **options)
    for cache in caches:
        cache.crop(-1)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), generated)
    caches[1].verify()


def test_a_chunk_reads_the_keys_within_reach_only(small, build, tokens):
    model, ids = build("mpt", attention={"alibi_bias_max": 2}), tokens(1, 2600)  # slopes from 0.79 to 0.25
    with patch(model):
        cache = ALiBiCache()
        read(model, ids[:, :2560], cache)
        for layer in cache.layers:
            layer.keys.data[:, :, :1024], layer.values.data[:, :, :1024] = torch.nan, torch.nan
        assert bool(read(model, ids, cache).isfinite().all())


def test_an_interrupted_reading_continues(small, build_patched, tokens, tmp_path):
    model, ids = build_patched("bloom"), tokens(1, 400)
    expected, whole = read(model, ids, ALiBiCache()), []
    read(model, ids, ALiBiCache(), losses=whole.append)
    cache, reports, losses = ALiBiCache(tmp_path / "cache"), [], []

    def interrupt(*_: object) -> None:
        if cache.get_seq_length(0) >= 128 and len(cache.layers[1].store) < len(cache.layers[0].store):
            raise StoppedError

    handle = model.transformer.h[1].self_attention.register_forward_pre_hook(interrupt)
    with pytest.raises(StoppedError):
        read(model, ids, cache, progress=lambda *report: reports.append(report), losses=losses.append)
    handle.remove()
    assert reports == [(64, 400)]
    assert [len(layer.store) for layer in cache.layers] == [64, 64]
    del cache
    cache = ALiBiCache.open(tmp_path / "cache")
    assert torch.equal(cache.tokens(), ids[:, :64])
    logits = read(model, ids, cache, progress=lambda *report: reports.append(report), losses=losses.append)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat(losses, dim=1), torch.cat(whole, dim=1))
    assert reports[-1] == (400, 400)
    again = read(model, ids, cache)  # all tokens are cached
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_another_model_or_text_is_refused(small, build, tokens, tmp_path):
    model, other, ids = build("bloom"), build("bloom", seed=1), tokens(1, 200)
    tuned = copy.deepcopy(model)
    tuned.transformer.h[1].mlp.dense_h_to_4h.weight += 1e-3
    for one in (model, other, tuned):
        patch(one)
    read(model, ids, ALiBiCache(tmp_path / "cache"))
    cache = ALiBiCache.open(tmp_path / "cache")
    copied, unpatched, in_files = copy.deepcopy(cache), build("bloom"), ALiBiCache(tmp_path / "new")
    embedded = model.get_input_embeddings()(ids)
    assert_refused(
        (OTHER_MODEL, lambda: read(other, ids, cache)),
        (OTHER_MODEL, lambda: read(tuned, ids, cache)),
        ("holds another text", lambda: read(model, tokens(1, 200, seed=9), cache)),
        ("holds 200 tokens but the text has 100", lambda: read(model, ids[:, :100], cache)),
        ("call patch", lambda: unpatched(ids, past_key_values=in_files)),
        ("token ids in this cache are unknown", lambda: read(model, ids, copied)),
        (UNKNOWN, lambda: copied.save(tmp_path / "copied")),
        ("pass input_ids on the CPU, not inputs_", lambda: model(inputs_embeds=embedded, past_key_values=in_files)),
        ("training mode", lambda: read(model.train(), ids, cache)),
    )
    assert cache.get_seq_length() == 200
    assert bool(read(model.eval(), ids, cache).isfinite().all())


@pytest.mark.parametrize(
    "reordered",
    [
        lambda cache: cache.reorder_cache(torch.tensor([2, 1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
    ids=["reordered", "selected", "repeated"],
)
def test_token_ids_are_unknown_after_rows_were_reordered(reordered, build_patched, tokens, tmp_path):
    model, cache = build_patched("bloom"), ALiBiCache()
    read(model, tokens(3, 9), cache)
    reordered(cache)
    assert cache.tokens() is None
    assert_refused((UNKNOWN, lambda: cache.save(tmp_path / "cache")))


def test_after_a_reset_files_still_belong_to_the_model_that_made_them(build_patched, tokens, tmp_path):
    model, other, ids = build_patched("bloom"), build_patched("bloom", seed=1), tokens(1, 40)
    in_files, in_memory = ALiBiCache(tmp_path / "cache"), ALiBiCache()
    for cache in (in_files, in_memory):
        read(model, ids, cache)
        cache.reset()
    assert_refused((OTHER_MODEL, lambda: read(other, ids, in_files)))
    assert in_files.get_seq_length() == 0
    read(other, ids, in_memory)
    in_memory.save(tmp_path / "saved")
    assert_refused((OTHER_MODEL, lambda: read(model, ids, ALiBiCache.open(tmp_path / "saved"))))


def test_a_shared_cache_writes_nothing_to_its_folder(build_patched, tokens, tmp_path):
    model, ids, folder = build_patched("bloom"), tokens(1, 40), tmp_path / "cache"
    read(model, ids, ALiBiCache(folder))
    (folder / "layer-001").unlink()  # as if the process was killed in its first forward pass
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    cache = ALiBiCache.open(folder, mode="c")
    torch.testing.assert_close(read(model, ids, cache), read(model, ids, ALiBiCache()))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_saved_cache_is_shared_and_private_continuations_differ(small, build_patched, tokens, tmp_path):
    model, ids = build_patched("falcon new"), tokens(1, 300)
    cache = ALiBiCache()
    read(model, ids, cache)
    cache.save(tmp_path / "cache")
    assert "300 tokens, 2 layers" in repr(cache)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    shared = [ALiBiCache.open(tmp_path / "cache", mode="c") for _ in range(2)]
    questions = [torch.cat([ids, tokens(1, 70, seed=seed)], dim=1) for seed in (3, 4)]
    for one, question in zip(shared, questions, strict=True):
        expected = model.generate(question, past_key_values=ALiBiCache(), **options)
        assert torch.equal(model.generate(question, past_key_values=one, **options), expected)
    with pytest.raises(ValueError, match="open elsewhere"):
        ALiBiCache.open(tmp_path / "cache")
    del shared, one
    again = ALiBiCache.open(tmp_path / "cache")
    assert again.get_seq_length() == 300
    assert str(tmp_path / "cache") in repr(again)
    again.verify()
    del again
    with open(tmp_path / "cache" / "tokens", "r+b") as file:
        file.write(b"\1")
    with pytest.raises(ValueError, match="token ids of the cache are damaged"):
        ALiBiCache.open(tmp_path / "cache").verify()


def test_beams_are_refused_in_files_and_work_on_a_copy(small, build_patched, tokens, tmp_path):
    model, ids = build_patched("bloom"), tokens(1, 100)
    beams = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False, "use_cache": True}
    cache = ALiBiCache(tmp_path / "cache")
    read(model, ids[:, :-1], cache)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    expected = model.generate(ids, past_key_values=ALiBiCache(), **beams)
    assert torch.equal(model.generate(ids, past_key_values=twin, **beams), expected)
    with pytest.raises(ValueError, match="cannot be reordered"):
        cache.batch_repeat_interleave(2)
    cache.reset()
    assert cache.get_seq_length() == 0
    read(model, ids[:, :50], cache)
    assert torch.equal(cache.tokens(), ids[:, :50])


READS = """
    from transformers import BloomForCausalLM
    from alibi_attn.hf import ALiBiCache, patch, read
    from alibi_attn.hf.patching import reading
    reading._CHUNK = 16
    model = BloomForCausalLM.from_pretrained(path / "model").eval()
    patch(model)
    tokens = torch.load(path / "tokens")
    read(model, tokens[:, :40], ALiBiCache())  # starts the compiler, which would hold a killed child's files for a moment

    def work():
        folder = path / "cache"
        read(model, tokens, ALiBiCache.open(folder) if folder.exists() else ALiBiCache(folder))
"""


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_a_reading_killed_at_any_moment_continues_to_the_same_logits(kills, build, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 16)
    model, ids = build("bloom"), tokens(1, 600)
    model.save_pretrained(tmp_path / "model")
    torch.save(ids, tmp_path / "tokens")
    patch(model)
    lengths = [0]
    for _ in killed_at_random(READS, tmp_path, kills=kills, longest=0.4):
        if (tmp_path / "cache" / "cache.json").exists():
            cache = ALiBiCache.open(tmp_path / "cache")
            cache.verify() if cache.get_seq_length() else None
            lengths.append(min(cache.get_seq_length(), 599))  # a read text's last token is read again
            del cache
    assert lengths == sorted(lengths), "no finished chunk is lost"
    cache = ALiBiCache.open(tmp_path / "cache") if (tmp_path / "cache").exists() else ALiBiCache(tmp_path / "cache")
    last = read(model, ids, cache)
    torch.testing.assert_close(last, model(ids, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)
    cache.verify()
    memory = ALiBiCache()
    read(model, ids, memory)
    for layer, expected in zip(cache.layers, memory.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)


def test_a_missing_cache_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for name, found in (("gone", "does not exist"), ("", r"holds no cache\.json"), ("file", "is a file")):
        with pytest.raises(FileNotFoundError, match=f"{found}; pass the folder of an ALiBiCache"):
            ALiBiCache.open(tmp_path / name)


@pytest.mark.parametrize("family", ["bloom", "ours"])
def test_generating_with_the_cache_of_another_text_is_refused(family, build, tokens):
    model = build(family)
    first, other = tokens(1, 20), tokens(1, 30) % 7
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    handle = None if family == "ours" else patch(model)
    cache = ALiBiCache()
    text = model.generate(first, past_key_values=cache, **options)
    held = cache.get_seq_length()
    for wrong in (other, other[:, :5], other.expand(2, -1)):
        with pytest.raises(ValueError, match=f"the cache holds {held} tokens of another text; use a new ALiBiCache"):
            model.generate(wrong, past_key_values=cache, **options)
    shorter = rf"the cache holds {held} tokens but the text has 20; call cache.crop\({19 - held}\)"
    assert_refused((shorter, lambda: model.generate(first, past_key_values=cache, **options)))
    assert cache.get_seq_length() == held
    continued = model.generate(text, past_key_values=cache, **options)
    assert torch.equal(continued, model.generate(text, **options))
    if handle is not None:
        handle.undo()
        assert "generate" not in vars(model)
