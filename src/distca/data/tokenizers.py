"""Tokenizers: text to token ids.

``bytes``              built in: the 256 bytes of UTF-8, then bos 256, eos 257 and pad 258
``ids:N``              for files that hold token ids below N instead of text
``tokenizer.json``     a Hugging Face tokenizer or its folder; needs the library ``tokenizers``
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.documents import Document, Tokens
from distca.data.readers import read_json

KNOWN = "bytes, ids:N, a tokenizer.json or its folder"


class Tokenizer(ABC):
    """A tokenizer; ``add_bos`` and ``add_eos`` set which tokens enclose each document."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        *,
        bos: int | None = None,
        eos: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        for word, token, add in (("bos", bos, add_bos), ("eos", eos, add_eos)):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(
                    f"{word} = {token} in the tokenizer {name}: ids must be from 0 to below"
                    f" {vocab_size}"
                )
            if add and token is None:
                raise ValueError(
                    f"the tokenizer {name} has no {word} token: set {word} = ..., or"
                    f" add_{word} = false"
                )
        self.name, self.vocab_size, self.bos, self.eos = name, vocab_size, bos, eos
        self._before = np.array([bos] if add_bos else [], np.int64)
        self._after = np.array([eos] if add_eos else [], np.int64)

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Returns the tokens of the text, without bos and eos."""

    def document(self, text: str, *, prompt: str = "", index: int = 0) -> Document:
        """Returns bos, ``prompt`` (without a loss), ``text`` and eos; empty if there is no text."""
        if not prompt and not text:
            return Document.from_tokens([], index=index)
        known = self.encode(prompt)
        tokens = np.concatenate([self._before, known, self.encode(text), self._after])
        num_prompt = len(self._before) + len(known)
        return Document.from_tokens(tokens, num_prompt=num_prompt, index=index)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 text, and three special tokens."""

    BOS, EOS, PAD, VOCAB_SIZE = 256, 257, 258, 259

    def __init__(self, *, add_bos: bool = False, add_eos: bool = True) -> None:
        super().__init__(
            "bytes", self.VOCAB_SIZE, bos=self.BOS, eos=self.EOS, add_bos=add_bos, add_eos=add_eos
        )

    def encode(self, text: str) -> Tokens:
        plain = text.encode("utf-8", errors="surrogatepass")
        return np.frombuffer(plain, np.uint8).astype(np.int64)


class IdTokenizer(Tokenizer):
    """For files that hold token ids; knows only the size of the vocabulary and its eos."""

    def __init__(self, vocab_size: int, *, eos: int | None = None) -> None:
        super().__init__(f"ids:{vocab_size}", vocab_size, eos=eos)

    def encode(self, text: str) -> Tokens:
        raise ValueError(f"the tokenizer {self.name} reads no text: use bytes or a tokenizer.json")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``; bos and eos are given as text or by its ``tokenizer_config.json``."""

    def __init__(
        self,
        path: str | Path,
        *,
        bos: str | None = None,
        eos: str | None = None,
        add_bos: bool = False,
        add_eos: bool = True,
    ) -> None:
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        self._inner = _load(path)
        named = _named_tokens(path.with_name("tokenizer_config.json"))
        super().__init__(
            str(path),
            1 + max(self._inner.get_vocab().values(), default=0),  # ids may have gaps
            bos=self._id(bos or named["bos"], "bos", path),
            eos=self._id(eos or named["eos"], "eos", path),
            add_bos=add_bos,
            add_eos=add_eos,
        )

    def _id(self, token: str | None, word: str, path: Path) -> int | None:
        if token is None:
            return None
        number: int | None = self._inner.token_to_id(token)
        if number is None:
            raise ValueError(f"{word} = {token!r} is not a token of {path}: set one that is")
        return number

    def encode(self, text: str) -> Tokens:
        # JSON may hold half characters, which tokenizers cannot read.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        # The file's template would add bos a second time.
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int64)


def open_tokenizer(
    spec: str = "bytes",
    *,
    bos: str | int | None = None,
    eos: str | int | None = None,
    add_bos: bool = False,
    add_eos: bool = True,
) -> Tokenizer:
    """Opens a tokenizer; see the top of this file.

    bos, eos: special tokens as text, or as a number for ``ids:N``.
    """
    kind, _, size = spec.partition(":")
    if kind == "bytes" and not size:
        if bos is not None or eos is not None:
            raise ValueError("the tokenizer bytes has its own bos and eos: leave them out")
        return ByteTokenizer(add_bos=add_bos, add_eos=add_eos)
    if kind == "ids":
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"tokenizer {spec!r}: write ids:N with the size N of the vocabulary")
        if bos is not None or isinstance(eos, str):
            raise ValueError(
                f"bos = {bos!r} and eos = {eos!r} with the tokenizer {spec}: give only eos, as"
                " the number that ends each document"
            )
        return IdTokenizer(int(size), eos=eos)
    if isinstance(bos, int) or isinstance(eos, int):
        raise ValueError(f"bos = {bos!r} and eos = {eos!r}: give the tokens of {spec} as text")
    return HuggingFaceTokenizer(spec, bos=bos, eos=eos, add_bos=add_bos, add_eos=add_eos)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"the tokenizer {path} does not exist: give {KNOWN}")
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ValueError(
            f"{path} needs the tokenizers library: pip install 'distca[hf]', or use bytes"
        ) from None
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    inner.no_truncation()  # settings of the file would cut documents silently
    inner.no_padding()
    return inner


def _named_tokens(path: Path) -> dict[str, str | None]:
    """Returns bos and eos of a ``tokenizer_config.json``, if it exists."""
    config = read_json(path) if path.is_file() else {}
    named: dict[str, str | None] = {}
    for word in ("bos", "eos"):
        token = config.get(f"{word}_token") if isinstance(config, dict) else None
        named[word] = token.get("content") if isinstance(token, dict) else token
    return named
