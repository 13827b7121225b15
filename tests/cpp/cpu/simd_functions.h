// The vector functions of every instruction set, as plain functions over arrays. The files that define them are
// compiled for their instruction set and contain nothing else, so that a test program runs on every machine.
#pragma once

#include <cstdint>

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
  void (*tanh)(const float* in, index_t n, float* out);
  // tanh_by_exp2(in, kTanhFactor), null where there is none.
  void (*tanh_by_exp2)(const float* in, index_t n, float* out);
  void (*dropout_row)(const DropoutRule&, index_t b, index_t h, index_t i, index_t j0, index_t n, std::uint8_t*);
  void (*dropout_columns)(const DropoutRule&, index_t b, index_t h, index_t i0, index_t n, index_t j0, std::uint8_t*,
                          index_t stride);
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
  static void tanh_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W) Simd::store(out + i, vtanh(Simd::load(in + i)));
  }
  static void tanh_by_exp2_of(const float* in, index_t n, float* out) {
    for (index_t i = 0; i < n; i += Simd::W)
      Simd::store(out + i, tanh_by_exp2(Simd::load(in + i), typename Simd::V(kTanhFactor)));
  }
  // A template, so that only what is asked for is compiled.
  template <bool HasTanhByExp2 = false>
  static constexpr SimdFunctions table(const char* name) {
    void (*by_exp2)(const float*, index_t, float*) = nullptr;
    if constexpr (HasTanhByExp2) by_exp2 = tanh_by_exp2_of;
    return {name,
            Simd::W,
            weight_of,
            weight_beside_products_of,
            from_products_of,
            tanh_of,
            by_exp2,
            cpu::dropout_row<Simd>,
            cpu::dropout_columns<Simd>};
  }
};

const SimdFunctions& portable_functions();
#if defined(FLASH_ATTN_X86)
const SimdFunctions& avx2_functions();
const SimdFunctions& avx512_functions();
#endif

}  // namespace flash_attn::testing
