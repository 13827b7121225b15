#include "arguments.h"

#include <list>

namespace flash_attn::torch_binding {

Signature::Signature(const c10::FunctionSchema& schema) : schema_(&schema) {
  positions_.fill(-1);
  for (const auto& argument : schema.arguments()) {
    const Name name{std::string_view(argument.name())};
    positions_[name.index()] = static_cast<std::int8_t>(names_.size());
    names_.push_back(name);
  }
}

const Signature& Signature::of(const c10::OperatorHandle& op) {
  static thread_local std::list<Signature> known;
  for (const Signature& signature : known) {
    if (signature.schema_ == &op.schema()) return signature;
  }
  known.push_front(Signature(op.schema()));
  return known.front();
}

Arguments::Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : signature_(Signature::of(op)), first_(stack.data() + stack.size() - signature_.names().size()) {}

const c10::IValue& Arguments::operator[](Name name) const {
  static const c10::IValue none;
  const int position = signature_.position(name);
  return position < 0 ? none : first_[position];
}

at::Tensor Arguments::tensor(Name name) const {
  const auto& value = (*this)[name];
  return value.isNone() ? at::Tensor() : value.toTensor();
}

Call Arguments::call() const {
  const auto& self = *this;
  const auto given = [&](Name name) { return !self[name].isNone(); };
  Call call;
  call.q = tensor("q"), call.k = tensor("k"), call.v = tensor("v");
  call.cu_seqlens_q = tensor("cu_seqlens_q"), call.cu_seqlens_k = tensor("cu_seqlens_k");
  call.rng_state = tensor("rng_state");
  if (given("max_seqlen_q")) call.max_seqlen_q = self["max_seqlen_q"].toSymInt();
  if (given("max_seqlen_k")) call.max_seqlen_k = self["max_seqlen_k"].toSymInt();
  call.dropout_p = self["dropout_p"].toDouble();
  call.softmax_scale = self["softmax_scale"].toDouble();
  call.causal = self["causal"].toBool();
  call.window_left = self["window_size_left"].toSymInt();
  call.window_right = self["window_size_right"].toSymInt();
  call.softcap = self["softcap"].toDouble();
  call.alibi_slopes = tensor("alibi_slopes");
  if (given("return_softmax")) call.return_softmax = self["return_softmax"].toBool();
  call.attn_bias = tensor("attn_bias"), call.attn_mask = tensor("attn_mask");
  call.learnable_sink = tensor("learnable_sink");
  call.key_begin = tensor("key_begin"), call.key_end = tensor("key_end");
  call.block_table = tensor("block_table"), call.leftpad_k = tensor("leftpad_k");
  call.seqused_k = tensor("seqused_k");
  if (given("num_splits")) call.num_splits = self["num_splits"].toInt();
  return call;
}

Inputs Arguments::inputs() const {
  if (const auto qkv = tensor("qkv"); qkv.defined()) return {qkv};
  if (const auto kv = tensor("kv"); kv.defined()) return {tensor("q"), kv};
  return {tensor("q"), tensor("k"), tensor("v")};
}

Outgoing::Outgoing(const c10::OperatorHandle& op) : op_(op), signature_(Signature::of(op)) {
  stack_.reserve(signature_.names().size());
  for (const auto& argument : op.schema().arguments())
    stack_.push_back(argument.default_value() ? *argument.default_value() : c10::IValue());
}

Outgoing::Outgoing(const c10::OperatorHandle& op, const c10::IValue& kept)
    : op_(op), signature_(Signature::of(op)), stack_(kept.toTuple()->elements().vec()) {}

void Outgoing::set(Name name, const at::Tensor& tensor) {
  if (tensor.defined()) (*this)[name] = tensor;
}

void Outgoing::set_all(const Arguments& arguments) {
  for (std::size_t n = 0; n < stack_.size(); ++n) {
    const auto& given = arguments[signature_.names()[n]];
    if (!given.isNone()) stack_[n] = given;
  }
}

c10::IValue Outgoing::without_tensors() const {
  torch::jit::Stack kept = stack_;
  for (auto& value : kept) {
    if (value.isTensor()) value = c10::IValue();
  }
  return c10::ivalue::Tuple::create(std::move(kept));
}

torch::jit::Stack Outgoing::call() && {
  op_.callBoxed(&stack_);
  return std::move(stack_);
}

}  // namespace flash_attn::torch_binding
