#!/usr/bin/env python3
"""Turns text into a token file that `tessera train` reads as data.path: NAME.bin beside NAME.json.

    .venv/bin/python tools/tokenize.py --model DIR --out NAME TEXT...

TEXT are files or folders of *.txt; each file is one document and is read whole. DIR is a Hugging Face
folder with tokenizer.json (or the file itself). After each document comes the end-of-text token of the
folder's config.json (`eos_token_id`), unless --eos names another or --no-eos leaves it out. Needs the
package `tokenizers`, which scripts/bootstrap --with-tests installs.
"""

import sys

del sys.path[0]  # this folder: the file would stand in for the standard module of its name
import argparse  # noqa: E402
import array  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402


def documents(paths):
    for path in paths:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise SystemExit(f"tokenize: no *.txt in {path}")
        yield from files


def end_of_text(arguments, tokenizer):
    """The id to put after a document, or None."""
    if arguments.no_eos:
        return None
    if arguments.eos is not None:
        found = tokenizer.token_to_id(arguments.eos)
        if found is None:
            raise SystemExit(f"tokenize: the tokenizer has no token {arguments.eos!r}")
        return found
    config = arguments.model / "config.json"
    found = json.loads(config.read_text()).get("eos_token_id") if config.is_file() else None
    found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, int):
        raise SystemExit(f"tokenize: no eos_token_id in {config}; name one by --eos or give --no-eos")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="NAME, without .bin")
    parser.add_argument("--eos", help="the token, as text, that ends a document")
    parser.add_argument("--no-eos", action="store_true")
    parser.add_argument("text", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    from tokenizers import Tokenizer

    source = arguments.model / "tokenizer.json" if arguments.model.is_dir() else arguments.model
    if not source.is_file():
        raise SystemExit(f"tokenize: {source} is not there")
    tokenizer = Tokenizer.from_file(str(source))
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    eos = end_of_text(arguments, tokenizer)
    largest = max([vocabulary - 1] + ([eos] if eos is not None else []))
    dtype, code = ("uint16", "H") if largest < 1 << 16 else ("uint32", "I")

    count = 0
    base = arguments.out.parent / arguments.out.name.removesuffix(".bin")
    base.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{base}.bin", "wb") as out:
        for path in documents(arguments.text):
            ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
            tokens = array.array(code, ids + ([eos] if eos is not None else []))
            if sys.byteorder == "big":
                tokens.byteswap()
            tokens.tofile(out)
            count += len(tokens)
            print(f"{path}: {len(tokens)} tokens", file=sys.stderr)
    pathlib.Path(f"{base}.json").write_text(json.dumps(
        {"dtype": dtype, "num_tokens": count, "vocab_size": largest + 1}) + "\n")
    print(f"{base}.bin: {count} tokens of {dtype}, vocabulary {largest + 1}")


if __name__ == "__main__":
    main()
