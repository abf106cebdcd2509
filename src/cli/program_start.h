// How the program starts: descriptors, signals, and what `ps` calls it. Pure.
//
// All of it belongs to the process, so only the program does it, not the library. Next:
// loader/main.cpp for what comes before, program_end.h.
#pragma once

namespace tessera::cli {

/// Makes writes fail to a stdout that the program was started without (>&-). Call it before any
/// file is opened: the file would get the number of stdout, and printed text would go into it.
void keep_standard_descriptors();

/// Makes a write beyond a file size limit (`ulimit -f`), or to a pipe without a reader, an error of
/// the write (EFBIG, EPIPE) instead of a signal that ends the process.
void ignore_signals_of_writes();

/// Names the process "tessera" in `ps` and `top`, which after an execution through /proc/self/exe
/// call it "exe".
void name_process();
/// Names a process that is a rank "tessera:RANK".
void name_process_of_rank(int rank);

}  // namespace tessera::cli
