// World and Mesh for Python, and what a wait for other ranks asks of the interpreter.
//
// Every call here that waits for other ranks releases the GIL. While one waits on the main thread,
// Python's handlers of signals run: Ctrl-C leaves it as KeyboardInterrupt.
// Next: python/tessera/_world.py.
#include "tessera/world.h"

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "binding.h"
#include "tessera/error.h"
#include "tessera/group.h"
#include "tessera/interrupt.h"
#include "tessera/mesh.h"

namespace tessera::python {
namespace {

/// A lost rank ends the call that waits, not the process: `except` and `finally` of Python run.
WorldOptions options_of(const std::string& backend, const std::string& device,
                        std::optional<double> timeout, std::optional<double> init_timeout) {
  const auto milliseconds = [](double seconds) {
    return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
  };
  WorldOptions options;
  options.backend = backend;
  options.device = device;
  if (timeout) options.timeout = milliseconds(*timeout);
  if (init_timeout) options.init_timeout = milliseconds(*init_timeout);
  options.lost_rank_ends = LostRankEnds::kCall;
  return options;
}

/// Opens the groups of all ranks while all are here. A rank that alone makes the first call that
/// needs one (save_checkpoint, a barrier) would wait for the others to open it, and a wait that is
/// in no collective tells the failure watch nothing. On a device the second one is left until it is
/// used, as it takes memory there.
std::shared_ptr<World> with_groups(std::shared_ptr<World> world) {
  world->control();
  if (world->device().is_cpu()) world->group();
  return world;
}

std::shared_ptr<World> connect(const std::string& backend, const std::string& device,
                               std::optional<double> timeout, std::optional<double> init_timeout) {
  return with_groups(World::connect(options_of(backend, device, timeout, init_timeout)));
}

std::shared_ptr<World> from_store(const StorePtr& store, int rank, int size,
                                  const std::string& backend, const std::string& device,
                                  std::optional<double> timeout,
                                  std::optional<double> init_timeout) {
  return with_groups(
      World::from_store(store, rank, size, options_of(backend, device, timeout, init_timeout)));
}

ReduceOp operation(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "max") return ReduceOp::kMax;
  TESSERA_CHECK(name == "min", ErrorKind::kUsage, "all_reduce: found op \"", name,
                R"(", expected "sum", "max" or "min")");
  return ReduceOp::kMin;
}

Mesh mesh_of(const std::shared_ptr<World>& world, int dp_replicate, int dp_shard) {
  return world->mesh(MeshShape::dense(1, dp_replicate, dp_shard, 1, 1));
}

/// Handlers of signals run on the main thread alone; others wait without a look at Python.
void run_signal_handlers(unsigned long main_thread) {
  if (PyThread_get_thread_ident() != main_thread || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

bool must_fail = false;  // where the process would end well

/// The interpreter gives exit() a code of its own, which what its atexit functions find cannot
/// change. Where that is 0 the process ends with 1.
void exit_with_failure() {
  static const int registered = ::on_exit([](int code, void*) { must_fail = code == 0; }, nullptr);
  TESSERA_INVARIANT(registered == 0, "exit_with_failure: found no room for a function");
}

/// Functions of on_exit() and atexit(), and destructors of static objects, have run when those of
/// libraries do: a profiler has written what it found.
__attribute__((destructor)) void fail_at_the_end() {
  if (!must_fail) return;
  std::fflush(nullptr);
  ::_exit(1);
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<World, std::shared_ptr<World>>(module, "World", DestroyedWithoutGil())
      .def_static("connect", &connect, py::kw_only(), py::arg("backend"), py::arg("device"),
                  py::arg("timeout"), py::arg("init_timeout") = py::none(), ReleaseGil())
      .def_static("from_store", &from_store, py::arg("store"), py::arg("rank"), py::arg("size"),
                  py::kw_only(), py::arg("backend"), py::arg("device"), py::arg("timeout"),
                  py::arg("init_timeout") = py::none(), ReleaseGil())
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("local_rank", &World::local_rank)
      .def_property_readonly("backend", &World::backend)
      .def_property_readonly("device", &World::device)
      .def_property_readonly("closed", &World::closed)
      .def_property_readonly("aborted", &World::aborted)
      .def_property_readonly("recoveries", &World::recoveries)
      .def("recover", &World::recover, ReleaseGil())
      .def("close", &World::close, ReleaseGil())
      .def("close_failed", &World::close_failed, py::arg("why"), ReleaseGil())
      .def(
          "barrier", [](World& world) { world.group().barrier("barrier"); }, ReleaseGil())
      .def(
          "all_reduce",
          [](World& world, const at::Tensor& tensor, const std::string& op) {
            world.group().all_reduce(tensor, operation(op));
          },
          py::arg("tensor"), py::arg("op"), ReleaseGil());

  py::class_<Mesh>(module, "Mesh", DestroyedWithoutGil())
      .def(py::init(&mesh_of), py::arg("world"), py::arg("dp_replicate"), py::arg("dp_shard"),
           ReleaseGil())
      .def_property_readonly("dp_replicate",
                             [](const Mesh& mesh) { return mesh.size_of(axis::kReplicate); })
      .def_property_readonly("dp_shard",
                             [](const Mesh& mesh) { return mesh.size_of(axis::kShard); });

  module.def("exit_with_failure", &exit_with_failure);

  const auto thread = py::module_::import("threading").attr("main_thread")();
  set_interrupt_check([main_thread = thread.attr("ident").cast<unsigned long>()] {
    run_signal_handlers(main_thread);
  });
}

}  // namespace tessera::python
