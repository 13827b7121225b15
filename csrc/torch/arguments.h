// Arguments of operators by their names in the schemas, so that each argument list exists only there.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <string_view>

#include "call.h"

namespace flash_attn::torch_binding {

/// All names in the schemas of this library.
inline constexpr auto kNames = std::to_array<std::string_view>({
    "q",
    "k",
    "v",
    "kv",
    "qkv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "rng_state",
    "max_seqlen_q",
    "max_seqlen_k",
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_softmax",
    "attn_bias",
    "attn_mask",
    "learnable_sink",
    "key_begin",
    "key_end",
    "block_table",
    "leftpad_k",
    "seqused_k",
    "num_splits",
    "zero_tensors",
    // Of backward.
    "dout",
    "out",
    "softmax_lse",
    "packing",
    "dlse",
    "bias_gradient",
    "sink_gradient",
    "dq",
    "dk",
    "dv",
    // Of caches.
    "k_cache",
    "v_cache",
    "cache_seqlens",
    "cache_batch_idx",
    "cache_leftpad",
    "rotary_cos",
    "rotary_sin",
    "rotary_interleaved",
    // Of rotary embeddings.
    "x",
    "cos",
    "sin",
    "offset",
    "offsets",
    "cu_seqlens",
    "interleaved",
    "conjugate",
    "max_seqlen",
});

/// One of them, found while compiling: a name that is in no schema does not compile.
class Name {
 public:
  consteval Name(const char* text) : Name(std::string_view(text)) {}
  explicit constexpr Name(std::string_view text) {
    while (kNames.at(index_) != text) ++index_;
  }

  constexpr std::size_t index() const { return index_; }
  constexpr const char* text() const { return kNames[index_].data(); }

 private:
  std::size_t index_ = 0;
};

/// Where an operator has its arguments.
class Signature {
 public:
  /// Worked out once per thread and operator.
  static const Signature& of(const c10::OperatorHandle& op);

  /// Negative if it has no such argument.
  int position(Name name) const { return positions_[name.index()]; }
  /// In the schema's order.
  const std::vector<Name>& names() const { return names_; }

 private:
  explicit Signature(const c10::FunctionSchema& schema);

  const c10::FunctionSchema* schema_;
  std::vector<Name> names_;
  std::array<std::int8_t, kNames.size()> positions_;
};

/// Arguments on an operator's stack.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const Signature& signature() const { return signature_; }
  /// None if the operator has no such argument.
  const c10::IValue& operator[](Name name) const;
  /// Undefined for None.
  at::Tensor tensor(Name name) const;
  /// The Call without q, k and v of a packed operator.
  Call call() const;
  Inputs inputs() const;

 private:
  const Signature& signature_;
  const c10::IValue* first_;
};

/// A call of an operator, to be made. What is not set is at its default, or None.
class Outgoing {
 public:
  explicit Outgoing(const c10::OperatorHandle& op);
  /// With what `without_tensors` kept of a call with the same argument list.
  Outgoing(const c10::OperatorHandle& op, const c10::IValue& kept);

  c10::IValue& operator[](Name name) { return stack_.at(static_cast<std::size_t>(signature_.position(name))); }
  void set(Name name, const at::Tensor& tensor);
  /// Sets what this operator takes too and is not None there.
  void set_all(const Arguments& arguments);
  /// All that is set and no tensor, for a formula to keep; tensors are for autograd to save.
  c10::IValue without_tensors() const;
  /// Results, through the dispatcher.
  torch::jit::Stack call() &&;

 private:
  c10::OperatorHandle op_;
  const Signature& signature_;
  torch::jit::Stack stack_;
};

/// Replaces an operator's arguments on the stack by its results.
template <class... Results>
void reply(torch::jit::Stack* stack, const c10::OperatorHandle& op, Results&&... results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::forward<Results>(results)...);
}

inline c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace flash_attn::torch_binding
