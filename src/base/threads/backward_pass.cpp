#include "base/threads/backward_pass.h"

#include <torch/csrc/autograd/graph_task.h>

#include "base/pass_local.h"

namespace tessera::base {
namespace {

/// The graph task's number plus one; 0 for none.
using Foreign = PassLocal<PassValue::kForeignBackward, int>;

}  // namespace

int graph_task_of_pass() {
  const int of_thread = torch::autograd::get_current_graph_task_id();
  return of_thread == foreign_graph_task() ? -1 : of_thread;
}

void set_foreign_graph_task(int graph_task) { Foreign::here() = graph_task + 1; }
int foreign_graph_task() { return Foreign::here() - 1; }

}  // namespace tessera::base
