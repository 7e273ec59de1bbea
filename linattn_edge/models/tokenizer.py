"""Text and token ids: bytes, or a Hugging Face tokenizer.json through the package `tokenizers`."""

import codecs
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from linattn_edge.errors import CheckpointError


class Tokenizer(Protocol):
    """What turns text into ids and ids into text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without those that mark a beginning or an end."""
        ...

    def marks(self) -> tuple[list[int], list[int]]:
        """The ids that mark the beginning and the end of a text."""
        ...

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, in pieces that are whole characters."""
        ...


class ByteTokenizer:
    """Ids are the bytes of UTF-8: a vocabulary of 256."""

    def encode(self, text: str) -> list[int]:
        """The bytes of a text; those that Python could not decode, as they were."""
        return list(text.encode("utf-8", "surrogateescape"))

    def marks(self) -> tuple[list[int], list[int]]:
        """None."""
        return [], []

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of bytes as they come; what is not UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            text = decoder.decode(bytes([token]))
            if text:
                yield text
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest


class FileTokenizer:
    """A tokenizer.json of Hugging Face."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise ImportError(f"{path} needs the package tokenizers: pip install 'linattn-edge[tokenizers]'") from None
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: there is no such file")
        try:
            self._backend: Any = Backend.from_file(os.fspath(path))
        except Exception as error:  # the package raises Exception itself
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from None

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return list(self._backend.encode(readable, add_special_tokens=False).ids)

    def marks(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        marked, plain = self._backend.encode("a").ids, self.encode("a")
        for start in range(len(marked) - len(plain) + 1):
            if marked[start : start + len(plain)] == plain:
                return marked[:start], marked[start + len(plain) :]
        return [], []

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come: each piece is what an id adds to the text of the few before it."""
        window: list[int] = []  # ids whose text is out, `known` of them, and ids that do not end a character yet
        known = 0
        for token in ids:
            window.append(token)
            before, text = self._text(window[:known]), self._text(window)
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield text[len(before) :]
                window, known = window[known:], len(window) - known
        before, text = self._text(window[:known]), self._text(window)
        if len(text) > len(before):
            yield text[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids))


def load_tokenizer(folder: str | os.PathLike[str], vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder: its tokenizer.json, or bytes for a vocabulary of 256 without one."""
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        return FileTokenizer(path)
    if vocab_size == 256:
        return ByteTokenizer()
    raise CheckpointError(f"{path}: there is no such file, and {vocab_size} ids are more than bytes")
