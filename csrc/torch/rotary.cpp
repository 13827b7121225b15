// The operators flash_attn::rotate and rotate_: rotary position embedding of CPU tensors, by the core. Other devices
// get their kernel from flash_attn/ops/triton/rotary.py.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <flash_attn/rotary.h>
#include <torch/library.h>

#include "ops.h"
#include "views.h"

namespace flash_attn::torch_binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void rotate_into(const at::Tensor& out, const at::Tensor& x, const Arguments& arguments) {
  const at::Device device = x.device();
  const auto host_view = [&](const at::Tensor& tensor, const char* name) {
    TensorView v = view(tensor, name, device, "x");
    v.device = Device::cpu;  // Also while a simulated GPU stands in for the CPU in attention: it has no such kernel.
    return v;
  };
  const auto contiguous = [&](const char* name) {
    const at::Tensor tensor = arguments.tensor(name);
    return tensor.defined() ? tensor.contiguous() : tensor;
  };
  const at::Tensor offsets = contiguous("offsets"), cu_seqlens = contiguous("cu_seqlens");
  const at::Tensor cos = contiguous_rows(arguments.tensor("cos")), sin = contiguous_rows(arguments.tensor("sin"));
  RotaryArgs args;
  args.x = host_view(x, "x"), args.out = host_view(out, "out");
  args.cos = host_view(cos, "cos"), args.sin = host_view(sin, "sin");
  args.offset = arguments["offset"].toSymInt().guard_int(__FILE__, __LINE__);
  args.offsets = host_view(offsets, "offsets"), args.cu_seqlens = host_view(cu_seqlens, "cu_seqlens");
  const auto& longest = arguments["max_seqlen"];
  TORCH_CHECK(!args.cu_seqlens.given() || !longest.isNone(),
              "flash_attn: cu_seqlens was given without max_seqlen; pass the longest sequence's length");
  if (!longest.isNone()) args.max_seqlen = longest.toSymInt().guard_int(__FILE__, __LINE__);
  args.interleaved = arguments["interleaved"].toBool();
  args.conjugate = arguments["conjugate"].toBool();
  calling_core([&] { apply_rotary(args, executor_for(device)); });
}

at::Tensor allocate(const at::Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

void rotate_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const at::Tensor x = contiguous_rows(arguments.tensor("x")), out = allocate(x);
  rotate_into(out, x, arguments);
  reply(stack, op, out);
}

void rotate_in_place_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const at::Tensor x = arguments.tensor("x"), rows = contiguous_rows(x);
  at::assert_no_internal_overlap(x);
  rotate_into(rows, rows, arguments);
  if (rows.is_same(x))
    mark_written(x);
  else
    x.copy_(rows);
  reply(stack, op);
}

void rotate_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::Tensor out = allocate(meta_arguments(op, *stack).tensor("x"));
  reply(stack, op, out);
}

void rotate_in_place_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  meta_arguments(op, *stack);
  reply(stack, op);
}

/// Derivative in x of rotate, or of rotate_ where it is in place: rotation by the opposite angles, which is
/// differentiable again. The tables get no gradient.
template <bool in_place>
class RotateFunction : public torch::autograd::Function<RotateFunction<in_place>> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, Named arguments) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list saved;
    for (const auto* name : kSaved) saved.push_back(tensor_of(arguments[name]));
    ctx->save_for_backward(std::move(saved));
    for (const auto& [name, value] : arguments) {
      if (!value.isTensor()) ctx->saved_data[name] = value;
    }
    arguments["x"] = x;
    if (!in_place) return call_operator("flash_attn::rotate", arguments).at(0).toTensor();
    call_operator("flash_attn::rotate_", arguments);
    ctx->mark_dirty({x});
    return x;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    Named arguments = ctx->saved_data;
    for (std::size_t n = 0; n < saved.size(); ++n) arguments[kSaved[n]] = value_of(saved[n]);
    arguments["x"] = gradients[0];
    arguments["conjugate"] = !arguments["conjugate"].toBool();
    return {call_operator("flash_attn::rotate", arguments).at(0).toTensor(), {}};
  }

 private:
  static constexpr const char* kSaved[] = {"cos", "sin", "offsets", "cu_seqlens"};
};

template <bool in_place>
void rotate_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  Named named;
  for (const auto& argument : op.schema().arguments()) named[argument.name()] = arguments[argument.name()];
  named.erase("x");
  const at::Tensor out = RotateFunction<in_place>::apply(arguments.tensor("x"), std::move(named));
  if (in_place)
    reply(stack, op);
  else
    reply(stack, op, out);
}

#define ROTARY_ARGUMENTS                                                                                           \
  "Tensor cos, Tensor sin, SymInt offset, Tensor? offsets, Tensor? cu_seqlens, bool interleaved, bool conjugate, " \
  "SymInt? max_seqlen=None"

TORCH_LIBRARY_FRAGMENT(flash_attn, m) {
  m.def("rotate(Tensor x, " ROTARY_ARGUMENTS ") -> Tensor");
  m.def("rotate_(Tensor(a!) x, " ROTARY_ARGUMENTS ") -> ()");
}

using Kernel = torch::CppFunction;
template <auto* out_of_place, auto* in_place>
void implement(torch::Library& m) {
  m.impl("rotate", Kernel::makeFromBoxedFunction<out_of_place>());
  m.impl("rotate_", Kernel::makeFromBoxedFunction<in_place>());
}

TORCH_LIBRARY_IMPL(flash_attn, CPU, m) { implement<rotate_kernel, rotate_in_place_kernel>(m); }
TORCH_LIBRARY_IMPL(flash_attn, Meta, m) { implement<rotate_meta, rotate_in_place_meta>(m); }
TORCH_LIBRARY_IMPL(flash_attn, Autograd, m) { implement<rotate_autograd<false>, rotate_autograd<true>>(m); }
TORCH_LIBRARY_IMPL(flash_attn, FuncTorchDynamicLayerFrontMode, m) { implement<refuse_transform, refuse_transform>(m); }
TORCH_LIBRARY_IMPL(flash_attn, Batched, m) { implement<refuse_transform, refuse_transform>(m); }

}  // namespace
}  // namespace flash_attn::torch_binding
