// The extension module tessera._C: the classes of include/tessera that the Python package uses.
//
// One source binds one part of the library. Every function that may wait for other ranks, allocate
// a unit's memory or drop tensors releases the GIL while it runs. Next: module.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <memory>
#include <optional>

#include "grad/torch_dtype.h"
#include "tessera/shard.h"

namespace tessera::python {

/// This thread is without the GIL while it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    // CPython before 3.14 ends a thread that asks for the GIL after the main one has begun to finalize
    // (a daemon thread that was in a call) by pthread_exit(), whose unwinding ends the process where
    // it meets a destructor. From 3.14 on it stays where it is, and so it does here.
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) ::pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// Other Python threads run while a function that is bound with this does.
using ReleaseGil = py::call_guard<WithoutGil>;
/// A class whose C++ destructor may wait for other ranks or drop tensors is bound with this.
using DestroyedWithoutGil = py::release_gil_before_calling_cpp_dtor;

using TorchDType = std::optional<at::ScalarType>;

inline std::optional<DType> dtype_of(const TorchDType& type) {
  return type ? std::optional(to_dtype(*type)) : std::nullopt;
}
inline TorchDType torch_dtype_of(const std::optional<DType>& dtype) {
  return dtype ? TorchDType(to_scalar_type(*dtype)) : std::nullopt;
}

/// A sharded module of Python: its forward is a call of Python between enter() and leave().
class PythonUnit : public ShardedBase {
 public:
  PythonUnit(std::shared_ptr<torch::nn::Module> tree, const Mesh& mesh,
             const PrecisionPolicy& policy, const ShardOptions& options)
      : ShardedBase(std::move(tree), mesh, policy, options) {}
  using ShardedBase::Call;
};

void bind_world(py::module_& module);
void bind_policy(py::module_& module);
void bind_module(py::module_& module);
void bind_optim(py::module_& module);
void bind_state(py::module_& module);

}  // namespace tessera::python
