#!/usr/bin/env python3
"""Writes tests/golden/data as tests read it.

    tests/golden/write_data.py FOLDER           what the build does, into build/PRESET/tests/golden/data
    tests/golden/write_data.py --store MADE...  stores folders as transformers wrote them (FAMILY-fp32 before FAMILY-mixed)

What follows from other files is not stored: results are packed (xz), FAMILY-mixed has the weights of FAMILY-fp32 in
the dtypes that its reference.json names, and NAME/sharded has those of NAME, cut as its index says. data/SHA256SUMS
has the sum of each file as transformers wrote it: one that comes out in other bytes is refused.
"""

import array
import hashlib
import json
import lzma
import pathlib
import re
import shutil
import sys

STORED = pathlib.Path(__file__).resolve().parent / "data"
SUMS = "SHA256SUMS"
RESULTS = ("reference.json", "reference.safetensors")
CONFIGS = ("config.json", "config.hub.json")
# Words of four bytes: their first bytes are alike.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}]
SIZES = {"F32": 4, "BF16": 2}


class Refused(Exception):
    pass


def read_tensors(path):
    """Returns (dtype, shape, bytes) by name."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return {name: (info["dtype"], info["shape"], data[begin + info["data_offsets"][0]:begin + info["data_offsets"][1]])
            for name, info in header.items()}


def write_tensors(path, tensors):
    """Writes as safetensors does: wider dtypes first, then by name; the header ends at a multiple of eight bytes."""
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(tensors, key=lambda name: (-SIZES[tensors[name][0]], name)):
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def to_bfloat16(data):
    """Rounds the bytes of float32 values to nearest, ties to even."""
    words = array.array("I", data)
    return array.array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]).tobytes()


def write_narrow(wide, narrow):
    """Writes the configs and the weights of FAMILY-mixed out of FAMILY-fp32."""
    for name in CONFIGS:
        text = (wide / name).read_text()
        (narrow / name).write_text(re.sub(r'("(?:torch_)?dtype": )"float32"', r'\1"bfloat16"', text))
    dtypes = {name: row["dtype"] for name, row in json.loads((narrow / RESULTS[0]).read_text())["parameters"].items()}
    tensors = {name: (dtypes[name], shape, data if dtypes[name] == "F32" else to_bfloat16(data))
               for name, (_, shape, data) in read_tensors(wide / "model.safetensors").items()}
    write_tensors(narrow / "model.safetensors", tensors)


def write_shards(folder):
    """Writes the files of NAME/sharded that its index names."""
    tensors = read_tensors(folder.parent / "model.safetensors")
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()):
        write_tensors(folder / file, {name: tensors[name] for name in tensors if files[name] == file})
    shutil.copyfile(folder.parent / "config.json", folder / "config.json")


def read_sums(stored):
    return {name: digest for digest, name in (line.split("  ") for line in (stored / SUMS).read_text().splitlines())}


def sum_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def unpack(path):
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise Refused(f"{path}: {error}; restore tests/golden/data") from error


def fill(out, stored):
    """Writes into an empty folder, and compares with the sums."""
    copied = set()
    for name, path in files_of(stored).items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xz":
            target.with_suffix("").write_bytes(unpack(path))
        else:
            shutil.copyfile(path, target)
            copied.add(name)
    for narrow in sorted(out.glob("*-mixed")):
        write_narrow(out / narrow.name.replace("-mixed", "-fp32"), narrow)
    for folder in sorted(out.glob("*/sharded")):
        write_shards(folder)
    sums, written = read_sums(stored), files_of(out)
    for name in sorted(set(sums) | set(written) - copied):
        found = sum_of(written[name]) if name in written else "no such file"
        expected = sums.get(name, "no such file")
        if found != expected:
            raise Refused(f"{name}: found {found}, expected {expected} as in {SUMS}; restore tests/golden/data, "
                          "or store again what transformers wrote (--store)")


def write(out, stored=STORED):
    """Replaces what an earlier call has written. A call that is ended leaves the old folder, the new one or none."""
    if out.exists() and not (out / SUMS).exists():
        raise Refused(f"{out}: found a folder that write_data.py has not written; name another one")
    made, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    for folder in (made, old):
        shutil.rmtree(folder, ignore_errors=True)
    made.mkdir(parents=True)
    fill(made, stored)
    if out.exists():
        out.rename(old)
    made.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def store(made, stored=STORED):
    """Keeps of a folder what does not follow from other files, and the sums of all."""
    target, narrow, files = stored / made.name, made.name.endswith("-mixed"), files_of(made)
    if not files.keys() >= set(RESULTS):
        raise Refused(f"{made}: found no {' and '.join(RESULTS)}, expected a folder as transformers wrote it")
    shutil.rmtree(target, ignore_errors=True)
    sums = read_sums(stored) if (stored / SUMS).exists() else {}
    sums = {name: digest for name, digest in sums.items() if not name.startswith(f"{made.name}/")}
    for name, path in files.items():
        sums[f"{made.name}/{name}"] = sum_of(path)
        kept, data = target / name, path.read_bytes()
        if name in RESULTS:
            kept, data = target / f"{name}.xz", lzma.compress(data, filters=FILTERS)
        elif not name.endswith(".index.json") and (narrow or "/" in name):
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    (stored / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def main():
    words = sys.argv[1:]
    try:
        if len(words) == 1 and not words[0].startswith("-"):
            write(pathlib.Path(words[0]))
        elif len(words) > 1 and words[0] == "--store":
            for word in words[1:]:
                store(pathlib.Path(word).resolve())
        else:
            print(__doc__)
            return 0 if words in (["-h"], ["--help"]) else 2
    except Refused as refused:
        print(f"write_data: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
