// Compiles where a compiler can make this project's code objects for a target: builtins that older ones lack. The fence of
// one address space came with clang 19.
extern "C" __attribute__((global, amdgpu_waves_per_eu(2))) void probe(float* x) {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront", "local");
  __builtin_amdgcn_sched_barrier(0x676);
  float value = __builtin_amdgcn_exp2f(x[__builtin_amdgcn_workitem_id_x()]);
#if defined(__gfx942__)
  using Short4 = __attribute__((ext_vector_type(4))) short;
  using Float4 = __attribute__((ext_vector_type(4))) float;
  value += __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(Short4{1}, Short4{2}, Float4{value}, 0, 0, 0)[0];
#elif defined(__gfx1200__) || defined(__gfx1201__)
  using Short8 = __attribute__((ext_vector_type(8))) short;
  using Float8 = __attribute__((ext_vector_type(8))) float;
  value += __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(Short8{1}, Short8{2}, Float8{value})[0];
#endif
  x[0] = value;
}
