"""Tokenizers: text to ids and back, piece by piece."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_edge.errors import CheckpointError
from linattn_edge.models.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

pytestmark = pytest.mark.nojit
TEXT = "The quick brown fox; naïve café, 日本語 and 🦊🦊. " * 3


@given(st.text())
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert "".join(tokenizer.stream(tokenizer.encode(text))) == text


def test_bytes_come_as_whole_characters():
    pieces = list(ByteTokenizer().stream("aé🦊".encode()))
    assert pieces == ["a", "é", "🦊"]
    assert list(ByteTokenizer().stream([0x61, 0xC3])) == ["a", "\ufffd"]
    assert list(ByteTokenizer().stream([0xFF, 0x62])) == ["\ufffd", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder with a byte-level BPE of 300 ids."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    return path


def test_a_file_there_and_back_piece_by_piece(folder):
    tokenizer = load_tokenizer(folder, 300)
    ids = tokenizer.encode(TEXT)
    assert 0 < len(ids) < len(TEXT.encode())
    pieces = list(tokenizer.stream(iter(ids)))
    assert "".join(pieces) == TEXT
    assert len(pieces) > 20
    assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.encode("🐙")[:-1]  # not in the text: bytes
    assert "".join(tokenizer.stream(cut)).startswith("\ufffd")


def test_marks_are_what_a_whole_text_gets(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    assert load_tokenizer(folder, 300).marks() == ([], [])
    assert ByteTokenizer().marks() == ([], [])
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<s>", "</s>"])
    ids = {name: made.token_to_id(name) for name in ("<s>", "</s>")}
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=list(ids.items())
    )
    made.save(str(tmp_path / "tokenizer.json"))
    first, last = load_tokenizer(tmp_path, 302).marks()
    assert (first, last) == ([ids["<s>"]] * 2, [ids["</s>"]])
    assert first + load_tokenizer(tmp_path, 302).encode(TEXT) + last == made.encode(TEXT).ids


def test_streams_keep_little(folder):
    """A long stream decodes a few ids at a time."""
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    longest, decode = 0, tokenizer._text

    def watched(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    tokenizer._text = watched
    assert "".join(tokenizer.stream(tokenizer.encode(TEXT) * 20)) == TEXT * 20
    assert longest < 16


def test_which_tokenizer_a_folder_has(folder, tmp_path, monkeypatch):
    assert isinstance(load_tokenizer(tmp_path, 256), ByteTokenizer)
    with pytest.raises(CheckpointError, match="32000 ids are more than bytes"):
        load_tokenizer(tmp_path, 32000)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(tmp_path, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'linattn-edge\[tokenizers\]'"):
        load_tokenizer(folder, 300)
