#!/usr/bin/env python3
"""Checks the C++ files: floors and their rooms, what they include (purity, narrow torch headers), and
that a message stands in one place.

The order of the floors is read from src/CMakeLists.txt, which sources are pure from the PURE lists
of src/*/CMakeLists.txt. Prints one line for each fault; exit code 1 if there is any.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = ("torch/", "ATen/", "c10/", "caffe2/")
# Folders of a floor, lowest first; what lies in none of them is above all.
ROOMS = {
    "base": ("text",),
    "fsdp": ("agreed", "runtime", "optim"),
    "train": ("config", "data", "report", "hf", "resume"),
}
# Public headers without a source of their name: the floor whose sources they declare, or the lowest
# that uses them.
HOME = {
    "checkpoint_values": "io",
    "forward_signature": "grad",
    "kernels_of": "kernels",
    "log_level": "base",
    "optimizer_rule": "grad",
    "precision": "grad",
    "recompute_mode": "grad",
    "shard": "fsdp",
    "tessera": "cli",
    "visit_tensors": "fsdp",
}
# Where a file is named after what it is a part of: a command, or a kernel.
NAMED_AFTER_OTHERS = ("cli", "kernels")
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
SENTENCE = 38  # characters of a literal that is a message, or the better part of one
MOST_FILES = 32  # in a folder: some 25 are a room, more are two
WIDE = ("torch/torch.h", "torch/extension.h", "torch/all.h")


def floors():
    text = (ROOT / "src/CMakeLists.txt").read_text()
    return re.search(r"foreach\(floor ([^)]*)\)", text).group(1).split()


def includes(path):
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        found = INCLUDE.match(line)
        if found:
            yield number, found.group(2)


def cmake_arguments(text, command):
    """The words of every call of command, comments removed."""
    text = re.sub(r"#.*", "", text)
    return [call.split() for call in re.findall(rf"{command}\(([^)]*)\)", text)]


def pure_sources():
    keywords = {"PURE", "TORCH", "USES", "LINK"}
    for lists in sorted((ROOT / "src").glob("*/CMakeLists.txt")):
        for words in cmake_arguments(lists.read_text(), "tessera_floor"):
            section = None
            for word in words:
                if word in keywords:
                    section = word
                elif section == "PURE" and not word.startswith("$"):
                    yield lists.parent / word
    # Each row of the registry of families names a folder with a pure source of its name.
    models = ROOT / "src/models"
    for name in re.findall(r"^TESSERA_FAMILY\(\w+, (\w+),", (models / "families.def").read_text(), re.M):
        yield models / name / f"{name}.cpp"


def own_header(name):
    """The file that a quoted include of ours means, or None."""
    for base in ("src", "include", "tests"):
        if (ROOT / base / name).is_file():
            return ROOT / base / name
    return None


def height_in_floor(name):
    """How high the room of a file (as an include spells it) is within its floor."""
    floor, _, rest = name.partition("/")
    rooms = ROOMS.get(floor, ())
    room = rest.partition("/")[0]
    return rooms.index(room) if room in rooms else len(rooms)


def check_rooms(fault):
    """A room is found from its name, and is not too full."""
    first = {}
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in (".cpp", ".h"):
            continue
        floor = path.relative_to(ROOT / "src").parts[0]
        if floor in NAMED_AFTER_OTHERS:
            continue
        other = first.setdefault(path.name, path)
        if floor != other.relative_to(ROOT / "src").parts[0]:
            fault(path, 1, f"{other.relative_to(ROOT)} has the same name, on another floor")
    for folder in sorted(p for p in (ROOT / "src").rglob("*") if p.is_dir()):
        count = sum(p.suffix in (".cpp", ".h") for p in folder.iterdir())
        if count > MOST_FILES:
            fault(folder, 1, f"found {count} files, expected at most {MOST_FILES}: two rooms")


def check_messages(fault):
    """What a person reads has one owner: a sentence that stands twice is changed once."""
    first = {}
    for path in sorted(p for top in ("src", "include") for p in (ROOT / top).rglob("*")):
        if path.suffix not in (".cpp", ".h"):
            continue
        text = re.sub(r"(?m)^[ \t]*//.*$", "", path.read_text())
        for found in re.finditer(rf"{LITERAL.pattern}(?:\s*{LITERAL.pattern})*", text):
            message = "".join(part[1:-1] for part in LITERAL.findall(found.group()))
            line = text.count("\n", 0, found.start()) + 1
            place = f"{path.relative_to(ROOT)}:{line}"
            other = first.setdefault(message, place) if len(message) >= SENTENCE else place
            if other != place:
                fault(path, line, f"found the message of {other}, expected it in one place: {message}")


def main():
    order = {name: height for height, name in enumerate(floors())}
    # A public header belongs to the floor that has a source of its name.
    home = dict(HOME)
    for name in order:
        for path in (ROOT / "src" / name).rglob("*.cpp"):
            home.setdefault(path.stem, name)
    faults = []

    def fault(path, line, text):
        faults.append(f"{path.relative_to(ROOT)}:{line}: {text}")

    for path in sorted((ROOT / "include").rglob("*.h")):
        if path.stem not in home:
            fault(path, 1, "belongs to no floor: no source has its name, and HOME in this script does not say")
    check_rooms(fault)
    check_messages(fault)

    def floor_of(name):
        top, _, rest = name.partition("/")
        if top == "tessera":
            return home.get(pathlib.Path(rest).stem)
        return top if top in order else None

    ours = [p for top in ("src", "include", "tests", "examples", "bench")
            for p in sorted((ROOT / top).rglob("*")) if p.suffix in (".cpp", ".h")]
    for path in ours:
        relative = path.relative_to(ROOT).parts
        own = relative[1] if relative[0] == "src" else None
        if own is not None and own not in order:
            fault(path, 1, f"floor '{own}' is not in the list of src/CMakeLists.txt")
            continue
        for line, name in includes(path):
            if name in WIDE:
                fault(path, line, f"{name} costs half a minute a file; include narrow headers")
            target = floor_of(name)
            if own and target and order[target] > order[own]:
                fault(path, line, f"floor '{own}' includes {name}, which is of floor '{target}' above it")
            if own and target == own and not name.startswith("tessera/"):
                here = "/".join(relative[1:])
                if height_in_floor(name) > height_in_floor(here):
                    fault(path, line, f"{here} includes {name}, which is of a room above it")
            if relative[0] == "include" and name.split("/")[0] in order:
                fault(path, line, f"a public header includes the private {name}")

    # Pure code sees no torch header, not even through another header.
    for source in pure_sources():
        if not source.is_file():
            continue
        seen, waiting = set(), [source]
        while waiting:
            path = waiting.pop()
            for line, name in includes(path):
                if name.startswith(TORCH):
                    fault(path, line, f"{name} is reached from the pure {source.relative_to(ROOT)}")
                header = own_header(name) or (path.parent / name if (path.parent / name).is_file() else None)
                if header and header not in seen:
                    seen.add(header)
                    waiting.append(header)

    print("\n".join(sorted(set(faults))), end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
