"""Bytes, ids alone, and a tokenizer.json that the library itself writes."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, processors

from distca.data.documents import IGNORE
from distca.data.tokenizers import open_tokenizer

WORDS = {"<s>": 0, "</s>": 1, "?": 2, "to": 3, "be": 4, "or": 5, "not": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of words, whose file asks for all that must not reach documents."""
    inner = Inner(models.WordLevel(WORDS, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    inner.add_special_tokens(["<s>", "</s>"])
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.text())
def test_bytes_are_those_of_utf8(text: str) -> None:
    tokenizer = open_tokenizer("bytes", add_bos=True)
    tokens = tokenizer.document(text).tokens
    assert bytes(tokens[1:-1].tolist()).decode() == text
    assert tokenizer.encode(text).tolist() == list(text.encode())
    if text:
        assert (tokens[0], tokens[-1]) == (256, 257)
    else:
        assert not len(tokens)  # two special tokens are no document


def test_bytes_have_259_ids() -> None:
    tokenizer = open_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (259, 256, 257)
    assert tokenizer.encode("\ud800").tolist() == [0xED, 0xA0, 0x80]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_prompts_are_read_and_not_learnt(bos: bool, eos: bool) -> None:
    document = open_tokenizer(add_bos=bos, add_eos=eos).document("cd", prompt="ab")
    assert document.tokens.tolist() == [256] * bos + [97, 98, 99, 100] + [257] * eos
    assert document.labels.tolist() == ([IGNORE] * bos + [IGNORE, 99, 100] + [257] * eos + [IGNORE])


def test_a_hugging_face_tokenizer(folder: Path) -> None:
    for spec in (folder, folder / "tokenizer.json"):
        tokenizer = open_tokenizer(str(spec), bos="<s>", eos="</s>", add_bos=True)
        assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (10, 0, 1)
        document = tokenizer.document("or not to be", prompt="to be")
        assert document.tokens.tolist() == [0, 3, 4, 5, 9, 3, 4, 1]
        assert document.labels.tolist() == [IGNORE, IGNORE, 5, 9, 3, 4, 1, IGNORE]
        assert tokenizer.encode("to \ud800").tolist() == [3, 2]


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_eos_is_taken_from_the_config_beside_the_file(folder: Path, eos: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = open_tokenizer(str(folder))
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)
    assert tokenizer.document("to be").tokens.tolist() == [3, 4, 1]


def test_ids_alone() -> None:
    tokenizer = open_tokenizer("ids:50257", eos="50256")
    assert (tokenizer.vocab_size, tokenizer.eos) == (50257, 50256)
    with pytest.raises(ValueError, match=r"ids:50257 reads no text: use bytes or a token"):
        tokenizer.document("a")


def test_what_is_wrong_is_said(folder: Path) -> None:
    (folder / "bad.json").write_text("{}")
    for spec, options, said in (
        ("words", {}, "the tokenizer words does not exist: give bytes, ids:N, a tokenizer.json"),
        (str(folder / "bad.json"), {}, "bad.json is not a tokenizer.json: "),
        (str(folder), {}, r"has no eos token: set data.eos = ..., or data.add_eos = false"),
        (str(folder), {"eos": "<end>"}, "eos '<end>' is not a token of .*: set data.eos"),
        ("bytes", {"eos": "x"}, "bytes has its own bos and eos: leave out data.bos"),
        ("ids:", {}, "'ids:': write ids:N with the size N of the vocabulary"),
        ("ids:0", {}, "write ids:N with the size"),
        (
            "ids:5",
            {"eos": "5"},
            "data.eos = 5 with the tokenizer ids:5: ids must be from 0 to below 5",
        ),
        ("ids:5", {"eos": "</s>"}, "give only data.eos, the number that ends each document"),
    ):
        with pytest.raises(ValueError, match=said):
            open_tokenizer(spec, **options)


def test_a_config_beside_the_file_may_be_damaged(folder: Path) -> None:
    for text, said in (
        ("[]", r"tokenizer_config\.json is not a table of entries: download it again"),
        ('{"eos_token": [1]}', r"eos_token in .*json is \[1\]: it must be a text"),
    ):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            open_tokenizer(str(folder))


def test_words_that_a_tokenizer_cannot_read_are_said(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"to": 0}, unk_token="?"))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path), add_eos=False)
    assert tokenizer.encode("to").tolist() == [0]
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot read a text \(.*\): mend it, or"):
        tokenizer.encode("be")


def test_a_missing_library_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the tokenizers library: pip install 'distca\[hf"):
        open_tokenizer(str(folder))
