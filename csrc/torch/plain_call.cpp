// torch.ops asks of every argument whether its type overrides torch's functions, and converts it by a general match of
// Python objects with schemas: 3 us for the 25 arguments of attention, as long as all the rest of a short call. Here
// plain arguments go to the same dispatcher at once. Everything else is left to torch.ops, so that a call means the
// same either way.
#include "plain_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace flash_attn::torch_binding {
namespace {

enum class Kind { tensor, optional_tensor, real, integer, optional_integer, boolean, other };

struct PlainOperator {
  c10::OperatorHandle handle;
  py::object general;  // Calls it through torch.ops.
  std::vector<Kind> kinds;
};

Kind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::tensor;
    case c10::TypeKind::FloatType: return Kind::real;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Kind::integer;
    case c10::TypeKind::BoolType: return Kind::boolean;
    case c10::TypeKind::OptionalType: {
      const Kind kind = kind_of(type->containedType(0));
      return kind == Kind::tensor    ? Kind::optional_tensor
             : kind == Kind::integer ? Kind::optional_integer
                                     : Kind::other;
    }
    default: return Kind::other;
  }
}

/// Pushes `object`, or returns false where it is no plain one of its kind.
bool push(Kind kind, PyObject* object, torch::jit::Stack& stack) {
  switch (kind) {
    case Kind::optional_tensor:
    case Kind::optional_integer:
      if (object == Py_None) return stack.emplace_back(), true;
      return push(kind == Kind::optional_tensor ? Kind::tensor : Kind::integer, object, stack);
    case Kind::tensor:
      if (!THPVariable_CheckExact(object) || THPVariable_Unpack(object).is_nested()) return false;
      stack.emplace_back(THPVariable_Unpack(object));
      return true;
    case Kind::real:
      if (!PyFloat_CheckExact(object)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(object));
      return true;
    case Kind::integer: {
      if (!PyLong_CheckExact(object)) return false;
      int overflow = 0;
      stack.emplace_back(static_cast<std::int64_t>(PyLong_AsLongLongAndOverflow(object, &overflow)));
      return overflow == 0;
    }
    case Kind::boolean:
      if (!PyBool_Check(object)) return false;
      stack.emplace_back(object == Py_True);
      return true;
    default: return false;
  }
}

/// Pushes all arguments, or returns false where torch.ops has to read them.
bool push_all(const PlainOperator& op, PyObject* const* given, Py_ssize_t number, torch::jit::Stack& stack) {
  const auto& arguments = op.handle.schema().arguments();
  if (static_cast<std::size_t>(number) > arguments.size() || at::impl::PythonTorchFunctionTLS::stack_len() > 0)
    return false;
  stack.reserve(arguments.size());
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    if (n < static_cast<std::size_t>(number)) {
      if (!push(op.kinds[n], given[n], stack)) return false;
    } else if (const auto& fallback = arguments[n].default_value()) {
      stack.push_back(*fallback);
    } else {
      return false;
    }
  }
  return true;
}

/// Of results that are tensors, as those of all operators here are: None, one, or a tuple of several; null with
/// Python's error set.
PyObject* python_of(torch::jit::Stack& results) {
  if (results.empty()) Py_RETURN_NONE;
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]).toTensor());
  auto tuple = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (std::size_t n = 0; tuple && n < results.size(); ++n) {
    PyObject* result = THPVariable_Wrap(std::move(results[n]).toTensor());
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(n), result);
  }
  return tuple.release().ptr();
}

/// A built-in function whose `self` is a capsule with its PlainOperator.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  const auto& op = *static_cast<const PlainOperator*>(PyCapsule_GetPointer(self, nullptr));
  torch::jit::Stack stack;
  if (!push_all(op, given, number, stack))
    return PyObject_Vectorcall(op.general.ptr(), given, static_cast<std::size_t>(number), nullptr);
  {
    py::gil_scoped_release no_gil;
    op.handle.callBoxed(&stack);
  }
  return python_of(stack);
  END_HANDLE_TH_ERRORS
}

py::object plain_call(const std::string& name, py::object general) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  auto op = std::make_unique<PlainOperator>(PlainOperator{handle, std::move(general), {}});
  for (const auto& argument : handle.schema().arguments()) op->kinds.push_back(kind_of(argument.type()));
  static PyMethodDef method{"plain_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                            METH_FASTCALL, "An operator of flash_attn, with positional arguments."};
  const py::capsule self(op.release(), [](void* owned) { delete static_cast<PlainOperator*>(owned); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void define_plain_calls(py::module_& m) {
  m.def(
      "_plain_call", &plain_call,
      "The operator `name` as a function of positional arguments, called at once where all of them are plain (tensors "
      "of no subclass and not nested, numbers, None; no function mode is on), else by `general`, given the same.",
      py::arg("name"), py::arg("general"));
}

}  // namespace flash_attn::torch_binding
