// How the program starts: descriptors, signals, and what `ps` calls it. Pure.
//
// All of it belongs to the process, so only the program does it, not the library. Next:
// spin_count.cpp for what comes before main(), program_end.h.
#pragma once

namespace tessera::cli {

/// Lets writing to a stdout that the program was started without (>&-) fail. Before any file is
/// opened: that would take its place, and what is printed would go into it.
void keep_standard_descriptors();

/// Makes writing past a file size limit (`ulimit -f`) and writing what nobody reads any more an
/// error of the write (EFBIG, EPIPE) instead of a signal that ends the process.
void ignore_signals_of_writes();

/// What `ps` and `top` show: "tessera". An execution through /proc/self/exe calls it "exe".
void name_process();
/// "tessera:RANK", of a process that is a rank.
void name_process_of_rank(int rank);

}  // namespace tessera::cli
