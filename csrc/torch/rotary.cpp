// The operators flash_attn::rotate and rotate_: rotary position embedding of CPU tensors, by the core. Other devices
// get their kernel from flash_attn/ops/triton/rotary.py.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <flash_attn/rotary.h>
#include <torch/csrc/autograd/custom_function.h>
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
  const auto contiguous = [&](Name name) {
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
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Arguments& arguments) {
    static const auto op = find_operator(in_place ? "flash_attn::rotate_" : "flash_attn::rotate");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list saved;
    for (const Name name : kSaved) saved.push_back(arguments.tensor(name));
    ctx->save_for_backward(std::move(saved));
    Outgoing rotate(op);
    rotate.set_all(arguments);
    ctx->saved_data[kArguments] = rotate.without_tensors();
    rotate.set("x", x);
    const auto results = std::move(rotate).call();
    if (!in_place) return results.at(0).toTensor();
    ctx->mark_dirty({x});
    return x;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find_operator("flash_attn::rotate");
    const auto saved = ctx->get_saved_variables();
    Outgoing rotate(op, ctx->saved_data[kArguments]);
    for (std::size_t n = 0; n < saved.size(); ++n) rotate.set(kSaved[n], saved[n]);
    rotate.set("x", gradients[0]);
    rotate["conjugate"] = !rotate["conjugate"].toBool();
    return {std::move(rotate).call().at(0).toTensor(), {}};
  }

 private:
  static constexpr Name kSaved[] = {"cos", "sin", "offsets", "cu_seqlens"};
  static constexpr const char* kArguments = "arguments";
};

template <bool in_place>
void rotate_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const at::Tensor x = arguments.tensor("x");
  // A tangent is refused by torch, in the formula.
  if (!needs_graph({x}) && !x._fw_grad(/*level=*/0).defined())
    return op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  const at::Tensor out = RotateFunction<in_place>::apply(x, arguments);
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
