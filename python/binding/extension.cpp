// tessera._C: its functions, and how errors of the library become exceptions of Python.
#include <string_view>

#include "binding.h"
#include "tessera/error.h"

namespace tessera::python {
namespace {

/// The class tessera.Error, a RuntimeError whose `kind` is the word of its ErrorKind. It lives as
/// long as the interpreter.
py::handle error_class;

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const std::string_view text = error.what();
    // A message may quote bytes of a file.
    const auto words = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    const auto value = error_class(words);
    value.attr("kind") = std::string(to_string(error.kind()));
    PyErr_SetObject(error_class.ptr(), value.ptr());
  }
}

void bind_error(py::module_& module) {
  py::dict body;
  body["__doc__"] =
      "An error of the library. `kind` is one of \"usage\", \"config\", \"contract\", \"format\", "
      "\"io\", "
      "\"comm\", \"numeric\", \"internal\".";
  body["__module__"] = "tessera";
  body["kind"] = "internal";
  const auto bases = py::make_tuple(py::handle(PyExc_RuntimeError));
  const auto type = py::handle(reinterpret_cast<PyObject*>(&PyType_Type));
  error_class = type("Error", bases, body).release();
  module.attr("Error") = error_class;
  py::register_local_exception_translator(translate);
}

}  // namespace
}  // namespace tessera::python

PYBIND11_MODULE(_C, module) {
  module.doc() = "The sharding library, as the package tessera calls it.";
  tessera::python::bind_error(module);
  tessera::python::bind_world(module);
  tessera::python::bind_policy(module);
  tessera::python::bind_module(module);
  tessera::python::bind_optim(module);
  tessera::python::bind_state(module);
}
