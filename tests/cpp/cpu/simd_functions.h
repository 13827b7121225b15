// The vector functions of every instruction set, as plain functions over arrays. The files that define them are
// compiled for their instruction set and contain nothing else, so that a test program runs on every machine.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "cpu/dropout_bits.h"

namespace flash_attn::testing {

inline constexpr float kTanhFactor = 0.375f;

struct SimdFunctions {
  const char* name;
  index_t lanes;
  // n is a multiple of `lanes`.
  void (*softmax_weight)(const float* in, index_t n, float* out);
  void (*softmax_weight_beside_products)(const float* in, index_t n, float* out);
  void (*from_products)(const float* in, index_t n, float* out);
  // Null where there is none, as all that tiles take: weights while subnormal results are flushed; tanh by division and
  // by an estimate; tanh_by_exp2(in, kTanhFactor) by both.
  void (*softmax_weight_flushed)(const float* in, index_t n, float* out);
  void (*tanh[2])(const float* in, index_t n, float* out);
  void (*tanh_by_exp2[2])(const float* in, index_t n, float* out);
  // out[i] = the sum of in[i * lanes ..), or their maximum; null where there is none.
  void (*sum_each)(const float* in, float* out);
  void (*max_each)(const float* in, float* out);
  // The first n of 2 * lanes bf16 elements, even ones and then odd ones; that order undone. Null where there is none.
  void (*split_pairs)(const void* in, index_t n, float* out);
  void (*interleave)(const float* in, float* out);
  // Of fp32, fp16 and bf16: the first n of `lanes` elements as `lanes` floats, and as many floats as n elements.
  struct First {
    index_t size;
    void (*load)(const void* in, index_t n, float* out);
    void (*store)(const float* in, index_t n, void* out);
  } first[3];
  void (*dropout_row)(const DropoutRule&, index_t b, index_t h, index_t i, index_t j0, index_t n, std::uint8_t*);
  void (*dropout_columns)(const DropoutRule&, index_t b, index_t h, index_t i0, index_t n, index_t j0, std::uint8_t*,
                          index_t stride);
  void (*dropout_rows)(const DropoutRule&, index_t b, const cpu::DropoutRows&, Range, index_t j0, std::uint8_t*);
};

template <class Simd>
struct SimdFunctionsOf {
  static void weight_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, softmax_weight(Simd::load(in + i)));
  }
  static void weight_beside_products_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, softmax_weight_beside_products(Simd::load(in + i)));
  }
  static void from_products_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, Simd::from_products(Simd::load(in + i)));
  }
  template <class Flush>
  static void weight_flushed_of(const float* in, index_t n, float* out) {
    const Flush flush;
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, softmax_weight_flushed(Simd::load(in + i)));
  }
  static void tanh_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, vtanh(Simd::load(in + i)));
  }
  template <class Divide>
  static void tanh_rational_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, tanh_rational(Simd::load(in + i), Divide()));
  }
  template <class Divide>
  static void tanh_by_exp2_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W)
      Simd::store(out + i, tanh_by_exp2(Simd::load(in + i), typename Simd::V(kTanhFactor), Divide()));
  }
  template <bool Max>
  static void reduce_each_of(const float* in, float* out) {
    typename Simd::V x[Simd::W];
    for (index_t i = 0; i < Simd::W; ++i) x[i] = Simd::load(in + i * Simd::W);
    if constexpr (Max)
      Simd::store(out, Simd::max_each(x));
    else
      Simd::store(out, Simd::sum_each(x));
  }
  static void split_pairs_of(const void* in, index_t n, float* out) {
    typename Simd::V x[2];
    const auto* const elements = static_cast<const BFloat16*>(in);
    Simd::split_pairs(n == 2 * Simd::W ? Simd::load_pairs(elements) : Simd::load_pairs(elements, n), x);
    for (int i = 0; i < 2; ++i) Simd::store(out + i * Simd::W, x[i]);
  }
  static void interleave_of(const float* in, float* out) {
    typename Simd::V x[2] = {Simd::load(in), Simd::load(in + Simd::W)};
    Simd::interleave(x);
    for (int i = 0; i < 2; ++i) Simd::store(out + i * Simd::W, x[i]);
  }
  template <class T>
  static void load_first_of(const void* in, index_t n, float* out) {
    Simd::store(out, Simd::load_first(static_cast<const T*>(in), n));
  }
  template <class T>
  static void store_first_of(const float* in, index_t n, void* out) {
    Simd::store_first(static_cast<T*>(out), Simd::load(in), n);
  }
  template <class T>
  static constexpr SimdFunctions::First first_of() {
    return {sizeof(T), load_first_of<T>, store_first_of<T>};
  }
  // A template, so that only what is asked for is compiled: with an estimate to divide by, and what flushes subnormal
  // results, all that tiles take.
  template <class Estimate = void, class Flush = void>
  static constexpr SimdFunctions table(const char* name) {
    SimdFunctions f{};
    f.name = name, f.lanes = Simd::W;
    f.softmax_weight = weight_of, f.softmax_weight_beside_products = weight_beside_products_of;
    f.from_products = from_products_of;
    f.tanh[0] = tanh_of;
    f.sum_each = reduce_each_of<false>;
    if constexpr (requires { &Simd::max_each; }) f.max_each = reduce_each_of<true>;
    if constexpr (requires { &Simd::interleave; }) f.split_pairs = split_pairs_of, f.interleave = interleave_of;
    f.first[0] = first_of<float>(), f.first[1] = first_of<Half>(), f.first[2] = first_of<BFloat16>();
    f.dropout_row = cpu::dropout_row<Simd>, f.dropout_columns = cpu::dropout_columns<Simd>;
    if constexpr (!std::is_void_v<Estimate>) {
      f.softmax_weight_flushed = weight_flushed_of<Flush>;
      f.tanh[1] = tanh_rational_of<Estimate>;
      f.tanh_by_exp2[0] = tanh_by_exp2_of<cpu::ByDivision>, f.tanh_by_exp2[1] = tanh_by_exp2_of<Estimate>;
      f.dropout_rows = cpu::dropout_rows<Simd>;
    }
    return f;
  }
};

const SimdFunctions& portable_functions();
#if defined(FLASH_ATTN_X86)
const SimdFunctions& avx2_functions();
const SimdFunctions& avx512_functions();
#endif
#if defined(FLASH_ATTN_ARM64)
const SimdFunctions& neon_functions();
#endif

}  // namespace flash_attn::testing
