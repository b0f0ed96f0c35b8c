"""Fingerprints of data: by which a resumed run, and every rank, knows that its data is the same.

All names and sizes count. Contents are read whole up to ``WHOLE`` bytes of a file; of larger files
and of many files, samples at fixed places are read, so that a start never waits for a large corpus.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.documents import Source

WHOLE = 1 << 20
SAMPLES, SAMPLE = 16, 1 << 16  # of a larger file: how many, and their bytes
MOST_FILES = 1024  # whose contents are read
Fingerprint = dict[str, Any]
_NEW = ("context", "vocab_size")  # which those of earlier versions do not have


def source_fingerprint(source: Source) -> Fingerprint:
    """Returns the fingerprint of a source's files and of its first tokens.

    Without files, its name and the settings that its documents depend on.
    """
    if not source.files:
        return {"name": source.name, **source.settings}
    tokens = hashlib.blake2b(source.document(0).tokens.tobytes(), digest_size=16)
    return fingerprint(source.files) | {"tokens": tokens.hexdigest()}


def fingerprint(files: Sequence[Path]) -> Fingerprint:
    """Returns the number, sizes and digests of files, which may have moved to another folder."""
    sizes = [file.stat().st_size for file in files]
    names, contents = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for file, size in zip(files, sizes, strict=True):
        names.update(f"{file.name}\0{size}\0".encode())
    chosen = np.unique(np.linspace(0, len(files) - 1, min(len(files), MOST_FILES)).astype(int))
    for index in chosen.tolist():
        contents.update(_sample(files[index], sizes[index]))
    return {
        "files": len(files),
        "bytes": sum(sizes),
        "names": names.hexdigest(),
        "contents": contents.hexdigest(),
    }


def change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns what differs between two fingerprints of one source; None if nothing does."""
    for key, words in {
        "name": "it was {} and is {}",
        "context": "its lengths were drawn for data.context = {}, which is {} now",
        "vocab_size": "its tokens were drawn from {} ids, which are {} now",
        "files": "it had {} files and has {}",
        "bytes": "it had {} bytes and has {}",
        "names": "its files have other names or sizes",
        "contents": "its files have the same names and sizes, but other contents",
        "tokens": "its first document has other tokens, so the tokenizer is another one",
    }.items():
        is_unknown = key in _NEW and key not in before
        if not is_unknown and before.get(key) != now.get(key):
            return words.format(before.get(key), now.get(key))
    return None


def _sample(path: Path, size: int) -> bytes:
    if size <= WHOLE:
        return path.read_bytes()
    with path.open("rb") as file:
        parts = []
        for offset in np.linspace(0, size - SAMPLE, SAMPLES).astype(int).tolist():
            file.seek(offset)
            parts.append(file.read(SAMPLE))
    return b"".join(parts)
