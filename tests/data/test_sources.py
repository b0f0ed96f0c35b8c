"""Every kind of source gives the documents that were written, and a sentence for all damage."""

import json
from pathlib import Path

import numpy as np
import pytest
from data.megatron import write_data_set, write_index

from distca.data.documents import IGNORE, Source
from distca.data.sources import NUM_SYNTHETIC, open_source
from distca.data.tokenizers import open_tokenizer

BYTES = open_tokenizer(add_eos=False)


def opened(where: str | Path) -> Source:
    return open_source(where, BYTES, context=64)


def texts(source: Source) -> list[str]:
    documents = [source.document(index) for index in range(len(source))]
    assert [document.index for document in documents] == list(range(len(source)))
    return [bytes(document.tokens.tolist()).decode() for document in documents]


def tokens(source: Source) -> list[list[int]]:
    return [source.document(index).tokens.tolist() for index in range(len(source))]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text(f"naïve {name}", encoding="utf-8")
    assert texts(opened(tmp_path)) == ["naïve a.txt", "naïve b.txt", "naïve sub/c.txt"]
    assert texts(opened(tmp_path / "d.md")) == ["naïve d.md"]
    assert texts(opened(str(tmp_path / "*.*"))) == ["naïve a.txt", "naïve b.txt", "naïve d.md"]
    assert opened(tmp_path).name == str(tmp_path)


def test_text_is_read_when_asked_for(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    source = opened(tmp_path)
    (tmp_path / "a.txt").write_text("later")
    (tmp_path / "b.txt").unlink()
    assert source.document(0).tokens.tolist() == list(b"later")
    with pytest.raises(ValueError, match=r"b\.txt can no longer be read: No such file"):
        source.document(1)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"text": "naïve\n", "id": 1}, {"tokens": [1, 2]}, {"input_ids": [7]}, {"text": ""}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert tokens(opened(path)) == [list("naïve\n".encode()), [1, 2], [7], []]


def test_only_completions_are_learnt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "ab", "completion": "cd", "text": "not this"}\n')
    document = open_source(path, open_tokenizer(), context=8).document(0)
    assert document.tokens.tolist() == [97, 98, 99, 100, 257]
    assert document.labels.tolist() == [IGNORE, 99, 100, 257, IGNORE]


def test_numpy_tokens_end_by_eos_or_by_lengths(tmp_path: Path) -> None:
    path, ids = tmp_path / "a.npy", [5, 257, 6, 7, 257, 8]
    np.save(path, np.array(ids, np.uint16))
    assert tokens(opened(path)) == [[5, 257], [6, 7, 257], [8]]
    other = open_source(path, open_tokenizer("ids:259", eos="7"), context=64)
    assert tokens(other) == [[5, 257, 6, 7], [257, 8]]
    np.save(tmp_path / "a.lengths.npy", np.array([1, 5]))
    assert tokens(opened(path)) == [[5], [257, 6, 7, 257, 8]]
    assert tokens(opened(str(tmp_path / "*.npy"))) == [[5], [257, 6, 7, 257, 8]]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron(tmp_path: Path, code: int, dtype: str) -> None:
    documents = [[1, 2, 3], [4], [5, 6]]
    path = write_data_set(tmp_path / "a.bin", documents, code, dtype)
    for where in (path, path.with_suffix(".idx"), str(tmp_path / "a.*")):
        assert tokens(opened(where)) == documents


def test_megatron_documents_may_have_several_sequences(tmp_path: Path) -> None:
    write_index(tmp_path / "a.idx", [2, 1, 3], [0, 2, 3])
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype=np.uint16).tobytes())
    assert tokens(opened(tmp_path / "a.bin")) == [[0, 1, 2], [3, 4, 5]]


def test_a_glob_reads_each_file_by_its_kind(tmp_path: Path) -> None:
    write_data_set(tmp_path / "1.bin", [[1, 2], [3]], 8, "<u2")
    (tmp_path / "2.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    (tmp_path / "3.txt").write_text("z")
    source = opened(str(tmp_path / "*"))
    assert tokens(source) == [[1, 2], [3], [120], [121], [122]]
    assert [source.document(index).index for index in range(5)] == [0, 1, 2, 3, 4]


def test_random_tokens_depend_on_seed_and_index_alone() -> None:
    def drawn(seed: int, order: list[int]) -> dict[int, list[int]]:
        source = open_source("lognormal:20:1", open_tokenizer("ids:9"), context=64, seed=seed)
        assert len(source) == NUM_SYNTHETIC
        return {index: source.document(index).tokens.tolist() for index in order}

    documents = drawn(0, [*range(40)])
    assert documents == drawn(0, [*range(40)][::-1])
    assert documents != drawn(1, [*range(40)])
    lengths = [len(document) for document in documents.values()]
    assert 1 <= min(lengths) < 20 < max(lengths) <= 64
    assert {token for document in documents.values() for token in document} == {*range(9)}


def test_the_standard_library_is_always_there() -> None:
    source = opened("stdlib")
    lengths = [len(source.document(index)) for index in range(len(source))]
    assert len(source) > 300
    assert min(lengths) > 0
    assert max(lengths) > 20 * np.median(lengths)
    assert any('"""JSON' in text or "JSON (JavaScript" in text for text in texts(source))


def test_the_standard_library_has_no_tests_and_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("b.py", "a/c.py")
    left = ("test/d.py", "a/tests/e.py", "site-packages/p/f.py", "idlelib/idle_test/g.py", "h.txt")
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert texts(opened("stdlib")) == ["a/c.py", "b.py"]
    for name in kept:
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="holds no Python source: use your own text"):
        opened("stdlib")


BAD_FILES = {
    "latin.txt": (b"na\xefve", r"latin\.txt is not UTF-8 text \(byte 2\): convert or remove it"),
    "a.json": ("[1]", r"a\.json is JSON: write one document per line to a \.jsonl"),
    "e.jsonl": ("\n \n", r"e\.jsonl holds no documents: it needs one or more"),
    "c.jsonl": ("\n\n{", r"line 3 of .*c\.jsonl is not JSON: "),
    "x.jsonl": (
        '\n{"length": 1}',
        r'line 2 of .*x\.jsonl is not a document: it needs "text", or "pro',
    ),
    "p.jsonl": ('{"prompt": "a"}', "line 1 of .* is not a document"),
    "f.jsonl": ('{"tokens": [1, 2.5]}', "token 1 of line 1 of .* is 2.5: it must be a whole numb"),
    "b.jsonl": ('{"tokens": [true]}', "token 0 of line 1 of .* is True: it must be"),
    "v.jsonl": (
        '{"tokens": [1, 259]}',
        "token 1 of line 1 of .* is 259 but the vocabulary has 259",
    ),
    "n.jsonl": ('{"tokens": [-1]}', "is -1 but the vocabulary has 259: set the tokenizer that"),
    "h.jsonl": (f'{{"tokens": [{10**30}]}}', "is 10+ but the vocabulary has 259"),
    "c.npy": ("oops", r"c\.npy is not a plain numpy array"),
    "a.bin": ("", r"a\.idx does not exist: a \.bin data set needs its \.idx next to it"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    content, said = BAD_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        opened(tmp_path / name)


def test_a_bad_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": 5}\n')
    source = opened(path)
    with pytest.raises(ValueError, match=r"line 4 of .*a\.jsonl is not a document"):
        source.document(2)


def test_bad_token_files_are_refused(tmp_path: Path) -> None:
    def array(ids: object, dtype: str, lengths: list[int] | None = None) -> Path:
        np.save(tmp_path / "a.npy", np.array(ids, dtype))
        if lengths:
            np.save(tmp_path / "a.lengths.npy", np.array(lengths))
        return tmp_path / "a.npy"

    def megatron(
        documents: list[list[int]], code: int, dtype: str, size: int | None = None
    ) -> Path:
        path = write_data_set(tmp_path / "a.bin", documents, code, dtype)
        path.write_bytes(path.read_bytes()[:size])
        return path

    for path, said in (
        (
            lambda: array([1.5, 2], "f4"),
            "type float32: it must be a one-dimensional array",
        ),
        (
            lambda: array([1, 2], "i4"),
            "does not contain token 257: give the id that ends its doc",
        ),
        (lambda: array([1, 300, 257], "i4"), "token 1 of document 0 of .* is 300 but the vocab"),
        (lambda: array([1, 2], "i4", [1]), "holds 2 tokens but its documents 1: lengths and tok"),
        (lambda: megatron([[1]], 6, "<f8"), "float64 tokens, in order: only whole numbers in the"),
        (lambda: megatron([[1], [2]], 8, "<i4"), "uint16 tokens, not in order"),
        (lambda: megatron([[1, 2]], 8, "<u2", 2), "holds 1 tokens but its documents 2"),
        (lambda: megatron([], 8, "<u2"), "holds no documents: it needs one or more"),
    ):
        with pytest.raises(ValueError, match=said):
            opened(path())


def test_lengths_are_asked_for_where_no_eos_is_known(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(
        ValueError, match=r"to a\.lengths\.npy next to it, or set data.eos to the t"
    ):
        open_source(tmp_path / "a.npy", open_tokenizer("ids:9"), context=8)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path / "a.idx", [1], [0, 1])
    for name, said in (
        ("x.txt", r"x\.txt does not exist: give stdlib, a text, \.jsonl"),
        ("*.md", "no file matches .*: give stdlib"),
        ("", r"holds no \.txt file: give stdlib"),
        ("a.idx", r"a\.bin does not exist: an \.idx needs its \.bin next to it"),
    ):
        with pytest.raises(ValueError, match=said):
            opened(str(tmp_path / name))
    with pytest.raises(ValueError, match="fixed:100 with a context of 64 tokens"):
        opened("fixed:100")
