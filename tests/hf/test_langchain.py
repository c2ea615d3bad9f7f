"""The lines for LangChain in docs/encoders.md: its vectors are those of `encode`, and longer texts are cut."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from encoder_oracle import config, random_state, write_folder, write_tokenizer

from alibi_attn.hf import sentence_transformer

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
TEXT = (Path(__file__).parent.parent.parent / "docs" / "encoders.md").read_text(encoding="utf-8")
[EXAMPLE] = [code for code in re.findall(r"^```py\n(.+?)^```", TEXT, re.DOTALL | re.MULTILINE) if "langchain" in code]
DOCUMENTS = ["a b c", "d e f g h", "z"]


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = write_folder(tmp_path / "jina", random_state("jina"), config("jina"))
    write_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "a a "}}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    return folder


def embeddings(model):
    """An instance of the example's class, which finds `model` among its globals."""
    namespace = {"__name__": "example", "model": model}
    exec(compile(EXAMPLE, "docs/encoders.md", "exec"), namespace)
    return namespace["Encoder"]()


def test_a_vector_store_finds_texts_by_the_vectors_of_encode(folder):
    from langchain_core.vectorstores import InMemoryVectorStore

    model = sentence_transformer(folder, max_seq_length=64, device="cpu")
    encoder = embeddings(model)
    assert np.array_equal(encoder.embed_documents(DOCUMENTS), model.encode(DOCUMENTS))
    assert np.array_equal(encoder.embed_query("z"), model.encode("a a z"))
    assert not np.array_equal(encoder.embed_query("z"), model.encode("z"))
    store = InMemoryVectorStore.from_texts(["a a b c", "a a d e f g h"], encoder)
    assert [found.page_content for found in store.similarity_search("d e f g h", k=1)] == ["a a d e f g h"]
