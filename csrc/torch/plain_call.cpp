// torch.ops asks of every argument whether its type overrides torch's functions, and converts it by a general match of
// Python objects with schemas: 3 us for the 25 arguments of attention, as long as all the rest of a short call. Here
// plain arguments go to the same dispatcher at once. Everything else is left to `general` in Python (_operators.py), so
// that a call means the same either way.
//
// A window and the default scale are read here too. After a call that has left nothing of Python in the caches, what
// they take there, attributes, isinstance and functions, waits for memory: 35 us on a Zen 4, where a call with a window
// of 512 keys takes 5 ms.
#include "plain_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <memory>
#include <vector>

namespace flash_attn::torch_binding {
namespace {

/// Of what Python gives. `scale` is a number or None, for D ** -0.5 of the first tensor; `window` a pair, for two
/// arguments of the operator.
enum class Kind { tensor, optional_tensor, real, scale, integer, optional_integer, window, boolean, other };

struct PlainOperator {
  c10::OperatorHandle handle;
  py::object general;
  // Of each object that Python gives: its kind, and the first of the operator's arguments that it is for.
  std::vector<Kind> kinds = {};
  std::vector<std::size_t> arguments = {};
  // The object that says whether there is more than one result; past all of them where none does.
  std::size_t return_softmax = static_cast<std::size_t>(-1);
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

/// Fills in how Python's objects become the operator's arguments.
void read_schema(PlainOperator& op) {
  const auto& arguments = op.handle.schema().arguments();
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string& name = arguments[n].name();
    if (name == "window_size_right") continue;
    if (name == "return_softmax") op.return_softmax = op.kinds.size();
    op.kinds.push_back(name == "window_size_left" ? Kind::window
                       : name == "softmax_scale"  ? Kind::scale
                                                  : kind_of(arguments[n].type()));
    op.arguments.push_back(n);
  }
}

bool push_integer(PyObject* object, torch::jit::Stack& stack) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  stack.emplace_back(static_cast<std::int64_t>(PyLong_AsLongLongAndOverflow(object, &overflow)));
  return overflow == 0;
}

/// A bound of a window: -1 for None.
bool push_bound(PyObject* object, torch::jit::Stack& stack) {
  if (object == Py_None) return stack.emplace_back(std::int64_t{-1}), true;
  return push_integer(object, stack);
}

bool push_window(PyObject* object, torch::jit::Stack& stack) {
  if (object == Py_None) return push_bound(object, stack) && push_bound(object, stack);
  if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 2) return false;
  return push_bound(PyTuple_GET_ITEM(object, 0), stack) && push_bound(PyTuple_GET_ITEM(object, 1), stack);
}

bool push_default_scale(const c10::IValue& first, torch::jit::Stack& stack) {
  if (!first.isTensor() || first.toTensor().dim() == 0) return false;
  const c10::SymInt head_dim = first.toTensor().sym_size(-1);
  if (head_dim.is_symbolic() || !(head_dim > 0)) return false;
  stack.emplace_back(std::pow(static_cast<double>(head_dim.guard_int(__FILE__, __LINE__)), -0.5));
  return true;
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
    case Kind::scale:
      if (object == Py_None) return push_default_scale(stack.front(), stack);
      return push(Kind::real, object, stack);
    case Kind::real:
      if (!PyFloat_CheckExact(object)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(object));
      return true;
    case Kind::integer: return push_integer(object, stack);
    case Kind::window: return push_window(object, stack);
    case Kind::boolean:
      if (!PyBool_Check(object)) return false;
      stack.emplace_back(object == Py_True);
      return true;
    default: return false;
  }
}

/// Pushes all arguments, or returns false where `general` has to read them.
bool push_all(const PlainOperator& op, PyObject* const* given, Py_ssize_t number, torch::jit::Stack& stack) {
  const auto& arguments = op.handle.schema().arguments();
  if (static_cast<std::size_t>(number) > op.kinds.size() || at::impl::PythonTorchFunctionTLS::stack_len() > 0)
    return false;
  stack.reserve(arguments.size());
  for (std::size_t n = 0; n < op.kinds.size(); ++n) {
    if (n < static_cast<std::size_t>(number)) {
      if (!push(op.kinds[n], given[n], stack)) return false;
    } else if (const auto& fallback = arguments[op.arguments[n]].default_value()) {
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
    if (op.return_softmax < static_cast<std::size_t>(number) && given[op.return_softmax] == Py_False) stack.resize(1);
  }
  return python_of(stack);
  END_HANDLE_TH_ERRORS
}

py::object plain_call(const std::string& name, py::object general) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  auto op = std::make_unique<PlainOperator>(PlainOperator{handle, std::move(general)});
  read_schema(*op);
  static PyMethodDef method{"plain_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                            METH_FASTCALL, "An operator of flash_attn, with positional arguments."};
  const py::capsule self(op.release(), [](void* owned) { delete static_cast<PlainOperator*>(owned); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void define_plain_calls(py::module_& m) {
  m.def(
      "_plain_call", &plain_call,
      "The operator `name` as a function of positional arguments, as the public functions take them: softmax_scale "
      "may be None, window_size is one argument, and without return_softmax there is one result. Called at once where "
      "all of them are plain (tensors of no subclass and not nested, numbers, None, tuples; no function mode is on), "
      "else by `general`, given the same.",
      py::arg("name"), py::arg("general"));
}

}  // namespace flash_attn::torch_binding
