// What each file that is compiled for an instruction set provides, and the choice among them.
#pragma once

#include "core/problem.h"
#include "cpu/units.h"

namespace flash_attn::cpu {

// A backward pass, in strips of so many keys and panels of so many queries.
struct BackwardKernel {
  index_t strip_rows, panel_columns;
  void (*run)(const BackwardProblem&, const Sequences&, const Executor&);
};

// One set of kernels: an instruction set with a multiplicand format.
struct Kernels {
  const char* instruction_set;
  const char* arithmetic;  // What products and sums are computed in.
  index_t strip_rows, panel_columns, elem_size;
  // Most rows per key head (queries times query heads of a group) for which forward reads K and V where they are, and
  // for which it packs key blocks as they are used.
  index_t direct_rows, in_place_rows;
  // Queries in the lanes (lanes.h): the most features that forward takes there, 0 if it has no such kernel, and the
  // most keys that meet kLaneQueries of them at a time.
  struct {
    index_t depth, keys;
  } lanes;
  index_t paired_features;  // Most features of which forward takes pairs (paired_products.h).
  // Fewest rows per key head and fewest keys for which forward is of use, and the least shorter_length for which
  // backward is: sequences with fewer are for other kernels.
  index_t least_rows, least_keys, least_length;
  void (*forward)(const ForwardProblem&, const Sequences&, const Executor&);
  // In strips of most rows, and in tall ones where some core gains by them (TallStrips): perhaps the same.
  BackwardKernel backward, tall;
  // Most queries that are faster met where K and V are, by these kernels' own way, which those have whose multiplicands
  // are fp32, or by others'.
  index_t direct_queries;
  void (*backward_direct)(const BackwardProblem&, const Sequences&, const Executor&);
  // Of learnable_sink and attn_bias, where these are asked for; reads backward's softmax_d.
  void (*table_gradients)(const BackwardProblem&, const Executor&);
};

const Kernels& portable_kernels();
const Kernels& portable_f64_kernels();
#if defined(FLASH_ATTN_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
// In tiles; a multiplicand of fp16 is the sum of two bf16, one of fp32 of three (Bf16Parts).
const Kernels& amx_bf16_kernels();
const Kernels& amx_bf16_few_kernels();  // Of few rows: forward alone.
const Kernels& amx_bf16_fp16_kernels();
const Kernels& amx_bf16_fp32_kernels();
// The same by vectors, for tests on machines without tiles. It is 1.4 MB, which builds without tests
// (FLASH_ATTN_EMULATED_TILES) go without.
const Kernels& amx_bf16_emulated_kernels();
const Kernels& amx_bf16_emulated_few_kernels();
const Kernels& amx_bf16_emulated_fp16_kernels();
const Kernels& amx_bf16_emulated_fp32_kernels();
#endif
#if defined(FLASH_ATTN_ARM64)
const Kernels& neon_kernels();
const Kernels& neon_bf16_kernels();
#endif

}  // namespace flash_attn::cpu
