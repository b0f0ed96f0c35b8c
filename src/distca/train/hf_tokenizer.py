"""Writes the tokenizer of a run as the files that ``transformers`` reads."""

import json
import shutil
from pathlib import Path
from typing import Any

from distca.data.tokenizers import BOS, EOS, NUM_BYTE_TOKENS, Tokenizer
from distca.train.config import DataSection

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_BESIDE = ("special_tokens_map.json", "chat_template.jinja")  # copied as they are
_NAMES = {BOS: "<|bos|>", EOS: "<|eos|>", NUM_BYTE_TOKENS - 1: "<|pad|>"}  # of ``bytes``


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the entries of ``config.json`` and ``generation_config.json`` for special tokens."""
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    ids |= {"pad_token_id": NUM_BYTE_TOKENS - 1} if tokenizer.name == "bytes" else {}
    return {name: token for name, token in ids.items() if token is not None}


def write_tokenizer(data: DataSection, tokenizer: Tokenizer, context: int, out: Path) -> bool:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``; returns False for token ids."""
    if tokenizer.name.startswith("ids:"):
        return False
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.name == "bytes":
        _byte_tokenizer().save(str(out / _FILE))
        bos, eos, pad = _NAMES.values()
        config |= {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    else:
        source = Path(tokenizer.name)
        shutil.copyfile(source, out / _FILE)
        for name in _BESIDE:
            if (beside := source.with_name(name)).is_file():
                shutil.copyfile(beside, out / name)
        if (settings := source.with_name(_CONFIG)).is_file():
            config |= json.loads(settings.read_text())
        chosen = {"bos_token": data.bos, "eos_token": data.eos}
        config |= {name: token for name, token in chosen.items() if token}
    config["model_max_length"] = context
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return True


def _byte_tokenizer() -> Any:
    """Returns ``bytes`` as a tokenizer of Hugging Face: a byte-level one without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in _NAMES.values()])
    return inner


def _characters() -> list[str]:
    """Returns the character by which byte-level tokenizers write each of the 256 bytes.

    Printable bytes stand for themselves, and the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
