#!/usr/bin/env python3
"""Checks that every thread_local of src/ and include/ is listed here, with why it may belong to the rank.

A thread is a rank, on which two passes may take turns (src/comm/turns.h): what the one sets would
leak into the other. So a value of a call, which may stay set across an exchange, is a
base::PassLocal (src/base/pass_local.h); what belongs to the rank stays a thread_local and is listed
here. Prints one line for each fault; exit code 1 if there is any.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# file: {name: why both passes of a rank may share it}
OF_A_RANK = {
    "src/base/doing.h": {"names_": "grows only; which name is meant is the pass's"},
    "src/base/interrupt.cpp": {"interrupt_of_thread": "compared inside of a handler, where no turn is passed"},
    "src/base/pass_local.h": {
        "values_of_thread": "the values of the first pass",
        "values_of_second": "what a turn exchanges",
    },
    "src/base/threads/exchange_times.cpp": {"t_times": "adds up what the rank's exchanges take, of both passes"},
    "src/base/threads/product.cpp": {"scopes": "around one product, in which no turn is passed"},
    "src/base/trace.cpp": {"t_current": "one trace a rank; each span holds its own beginning"},
    "src/comm/host_read.cpp": {"waits_of_thread": "the waits of the rank's World"},
    "src/comm/turns.h": {"now_": "the turns themselves", "passed_": "counts them, of both passes"},
    "src/dry/fake_device.cpp": {"t_stream": "a device's current stream: Turns exchanges it as a stream"},
    "src/dry/memory_count.cpp": {"t_count": "counts what the rank holds, whichever pass takes it"},
    "src/fsdp/dtype_watch.cpp": {"t_observer": "watches the rank; it keeps a stack of units for each pass"},
    "src/fsdp/recompute.cpp": {
        "serial": "numbers the checkpoints of the rank",
        "t_drew": "counts those that drew; they end pairs",
    },
    "src/grad/leaf.cpp": {"counted": "of the graph task under way, counted again where that is another"},
    "src/train/report/profile.cpp": {"t_times": "times the rank; it keeps a stack of calls for each pass"},
}
HOOK = "ThreadHook"  # base/test_hooks.h: what a test sets for its rank
COMMENT = re.compile(r"//[^\n]*")
DECLARED = re.compile(r"\bthread_local\b([^;={]*)")


def thread_locals(path):
    """Line and name of each."""
    text = COMMENT.sub("", path.read_text(errors="replace"))
    for found in DECLARED.finditer(text):
        if HOOK not in found.group(1):
            yield text.count("\n", 0, found.start()) + 1, re.findall(r"\w+", found.group(1))[-1]


def main():
    faults = []
    listed = {(file, name) for file, names in OF_A_RANK.items() for name in names}
    for path in sorted(p for top in ("src", "include") for p in (ROOT / top).rglob("*")):
        if path.suffix not in (".cpp", ".h"):
            continue
        file = str(path.relative_to(ROOT))
        for line, name in thread_locals(path):
            if name not in OF_A_RANK.get(file, {}):
                faults.append(
                    f"{file}:{line}: found the thread_local {name}, expected a base::PassLocal, which is "
                    "exchanged where two passes take turns; if it belongs to the rank, say why in "
                    "scripts/check_thread_locals.py")
            listed.discard((file, name))
    faults += [f"{file}: found no thread_local {name}, which scripts/check_thread_locals.py lists"
               for file, name in sorted(listed)]
    print("\n".join(faults), end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
