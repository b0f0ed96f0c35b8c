"""Tokenizers: text to token ids.

``bytes``              built in: the 256 bytes of UTF-8, then bos 256, eos 257 and pad 258
``ids:N``              for files that hold token ids below N instead of text
``tokenizer.json``     a Hugging Face tokenizer or its folder; needs the library ``tokenizers``
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.data.documents import Document, Tokens
from distca.data.readers import read_json

BOS, EOS, NUM_BYTE_TOKENS = 256, 257, 259  # of ``bytes``, with pad
KNOWN = "bytes, ids:N, a tokenizer.json or its folder"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer; ``add_bos`` and ``add_eos`` set which tokens enclose each document.

    encode: returns the tokens of a text, without bos and eos.
    """

    name: str
    vocab_size: int
    encode: Callable[[str], Tokens]
    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False

    def __post_init__(self) -> None:
        for word, token, add in (("bos", self.bos, self.add_bos), ("eos", self.eos, self.add_eos)):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"data.{word} = {token} with the tokenizer {self.name}: ids must be from 0 to"
                    f" below {self.vocab_size}"
                )
            if add and token is None:
                raise ValueError(
                    f"the tokenizer {self.name} has no {word} token: set data.{word} = ..., or"
                    f" data.add_{word} = false"
                )

    def document(self, text: str, *, prompt: str = "", index: int = 0) -> Document:
        """Returns bos, ``prompt`` (without a loss), ``text`` and eos; empty if there is no text."""
        if not prompt and not text:
            return Document.from_tokens([], index=index)
        bos = np.array([self.bos] if self.add_bos else [], np.int64)
        eos = np.array([self.eos] if self.add_eos else [], np.int64)
        known = np.concatenate([bos, self.encode(prompt)])
        tokens = np.concatenate([known, self.encode(text), eos])
        return Document.from_tokens(tokens, num_prompt=len(known), index=index)

    def check_ids(self, tokens: npt.NDArray[Any], where: str) -> None:
        """Raises ValueError for a token that is not in the vocabulary."""
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(bad):
            raise ValueError(
                f"token {int(bad[0])} of {where} is {int(tokens[bad[0]])} but the vocabulary has"
                f" {self.vocab_size}: set the tokenizer that the tokens were made with"
            )


def open_tokenizer(
    spec: str = "bytes",
    *,
    bos: str = "",
    eos: str = "",
    add_bos: bool = False,
    add_eos: bool = True,
) -> Tokenizer:
    """Opens a tokenizer; see the top of this file.

    bos, eos: tokens as text, instead of those of the tokenizer. For ``ids:N``, eos is the number
        that ends documents in a ``.npy`` file.
    add_bos, add_eos: whether they enclose the documents of a text.
    """
    kind, _, size = spec.partition(":")
    if kind == "bytes" and not size:
        if bos or eos:
            raise ValueError(
                "the tokenizer bytes has its own bos and eos: leave out data.bos and data.eos"
            )
        return Tokenizer("bytes", NUM_BYTE_TOKENS, _utf8, BOS, EOS, add_bos, add_eos)
    if kind == "ids":
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"tokenizer {spec!r}: write ids:N with the size N of the vocabulary")
        if bos or (eos and not eos.isdecimal()):
            raise ValueError(
                f"data.bos = {bos!r} and data.eos = {eos!r} with the tokenizer {spec}: give only"
                " data.eos, the number that ends each document"
            )
        end = int(eos) if eos else None
        return Tokenizer(f"ids:{int(size)}", int(size), partial(_read_no_text, spec), eos=end)
    return _hugging_face(Path(spec), {"bos": bos, "eos": eos}, add_bos, add_eos)


def _utf8(text: str) -> Tokens:
    plain = text.encode("utf-8", errors="surrogatepass")
    return np.frombuffer(plain, np.uint8).astype(np.int64)


def _read_no_text(spec: str, text: str) -> Tokens:
    raise ValueError(f"the tokenizer {spec} reads no text: use bytes or a tokenizer.json")


def _hugging_face(path: Path, chosen: Mapping[str, str], add_bos: bool, add_eos: bool) -> Tokenizer:
    """Opens a ``tokenizer.json``; bos and eos are chosen or in its ``tokenizer_config.json``."""
    path = path / "tokenizer.json" if path.is_dir() else path
    inner = _load(path)
    ids: dict[str, int | None] = {}
    for word, named in _named_tokens(path.with_name("tokenizer_config.json")).items():
        token = chosen[word] or named
        ids[word] = None if token is None else inner.token_to_id(token)
        if token is not None and ids[word] is None:
            raise ValueError(f"{word} {token!r} is not a token of {path}: set data.{word}")

    def encode(text: str) -> Tokens:
        # JSON may hold half characters, which tokenizers cannot read.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        # The file's template would add bos a second time.
        try:
            return np.array(inner.encode(text, add_special_tokens=False).ids, np.int64)
        except Exception as error:  # such as no token for what the vocabulary does not have
            raise ValueError(
                f"{path} cannot read a text ({error}): mend it, or use another tokenizer"
            ) from None

    vocab_size = 1 + max(inner.get_vocab().values(), default=0)  # ids may have gaps
    return Tokenizer(str(path), vocab_size, encode, **ids, add_bos=add_bos, add_eos=add_eos)


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
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a table of entries: download it again")
    named: dict[str, str | None] = {}
    for word in ("bos", "eos"):
        token = config.get(f"{word}_token")
        named[word] = token.get("content") if isinstance(token, dict) else token
        if not isinstance(named[word], str | None):
            raise ValueError(f"{word}_token in {path} is {token!r}: it must be a text")
    return named
