// in_backward_pass: whether this pass is inside of a backward.
//
// libtorch's current graph task belongs to the thread. Where two passes take turns on it
// (comm/turns.h), the code of one sees the graph task in which the other is suspended, and no
// function of libtorch exchanges it. So in_backward_pass() answers for the pass that calls it.
#pragma once

namespace tessera::base {

/// Returns libtorch's number of the graph task that this pass runs; -1 for none.
int graph_task_of_pass();
inline bool in_backward_pass() { return graph_task_of_pass() != -1; }

/// Marks `graph_task` as that of the other pass, while this one runs; -1 for none. For
/// comm/turns.cpp alone.
void set_foreign_graph_task(int graph_task);
/// Returns the number that was set last in this pass.
int foreign_graph_task();

}  // namespace tessera::base
