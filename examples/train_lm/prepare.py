"""Make the training text: public-domain books from Debian packages, cleaned, cut into a training and a held-out part.

    python prepare.py data

Needs a Debian or Ubuntu system with `apt-get` and `dpkg-deb` (no root) and its package mirror. Writes data/train.txt,
data/held_out.txt and data/sources.json (packages, versions, licences, sizes, digests).
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

PACKAGES = {
    "bible-kjv-text": "the King James Bible of 1611: copyright expired",
    "bible-kjv": "the program that unpacks that text (GPL-2+; only run, nothing of it is kept)",
    "jargon-text": "the Jargon File 4.4.7, edited by Eric S. Raymond: public domain",
    "dict-devil": "The Devil's Dictionary by Ambrose Bierce, 1911: public domain, copyright expired",
}
CHUNK = 16384  # bytes; the texts are cut at this distance, at the end of a line
HELD_OUT = 20  # every 20th chunk is held out


def unpack(folder: Path) -> dict[str, Path]:
    """Download the packages and unpack them, without installing: name → folder."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found = {}
    for name in PACKAGES:
        (archive,) = folder.glob(f"{name}_*.deb")
        target = folder / f"{name}.d"
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
        found[name] = target
    return found


def bible(roots: dict[str, Path]) -> str:
    """The whole text, one verse a line, a heading for each chapter."""
    program, data = roots["bible-kjv"] / "usr/bin/bible", roots["bible-kjv-text"] / "usr/lib"
    out = subprocess.run(
        [str(program), "-f", "-p", str(data), "ge1:1-re22:21"], cwd=data, check=True, capture_output=True, text=True
    ).stdout
    lines, chapter = [], ""
    for line in out.splitlines():
        found = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if found is None:
            continue
        book, number, verse, words = found.groups()
        if chapter != f"{book} {number}":
            chapter = f"{book} {number}"
            lines.append(f"\n{chapter}\n")
        lines.append(f"{verse} {words}")
    return "\n".join(lines)


def jargon(roots: dict[str, Path]) -> str:
    """The Jargon File as plain text."""
    data = gzip.decompress((roots["jargon-text"] / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes())
    return data.decode("utf-8", errors="replace")


def devil(roots: dict[str, Path]) -> str:
    """The Devil's Dictionary; dictzip is gzip with an index."""
    data = gzip.decompress((roots["dict-devil"] / "usr/share/dictd/devil.dict.dz").read_bytes())
    return data.decode("utf-8", errors="replace")


def clean(text: str) -> str:
    """ASCII, no trailing blanks, no tabs, at most one empty line in a row."""
    for odd, plain in (
        ("“", '"'),
        ("”", '"'),
        ("‘", "'"),
        ("’", "'"),
        ("—", "--"),
        ("–", "-"),
        ("…", "..."),
        ("\t", " "),
    ):
        text = text.replace(odd, plain)
    text = text.encode("ascii", errors="ignore").decode("ascii")
    text = re.sub(r"[^\n -~]", "", text)
    text = re.sub(r" +\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def split(text: str) -> tuple[list[str], list[str]]:
    """Chunks to train on, and every HELD_OUT-th one held out."""
    train, held = [], []
    start = number = 0
    while start < len(text):
        end = text.find("\n", start + CHUNK)
        end = len(text) if end < 0 else end + 1
        (held if number % HELD_OUT == HELD_OUT - 1 else train).append(text[start:end])
        start, number = end, number + 1
    return train, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held, sources = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        roots = unpack(Path(temporary))
        for name, read in (("bible-kjv-text", bible), ("jargon-text", jargon), ("dict-devil", devil)):
            text = clean(read(roots))
            parts = split(text)
            train += parts[0]
            held += parts[1]
            (archive,) = Path(temporary).glob(f"{name}_*.deb")
            sources.append({"package": archive.stem, "licence": PACKAGES[name], "bytes": len(text)})
    for name, chunks in (("train", train), ("held_out", held)):
        data = "".join(chunks).encode("ascii")
        (folder / f"{name}.txt").write_bytes(data)
        sources.append({"file": f"{name}.txt", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (folder / "sources.json").write_text(json.dumps(sources, indent=2) + "\n")
    for entry in sources:
        print(entry)


if __name__ == "__main__":
    main()
