// The CPU backend: one choice of instruction set at start, one choice of kernels per problem.
#include "core/backend.h"

#include "cpu/cache.h"
#include "cpu/cpuid.h"
#include "cpu/few_rows.h"
#include "cpu/folded_queries.h"
#include "cpu/instruction_sets.h"
#include "cpu/isa.h"
#include "cpu/lanes.h"
#include "cpu/paired_products.h"
#include "cpu/rotary.h"
#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn {
namespace cpu {
namespace {

#if defined(FLASH_ATTN_X86)
// Of numbers that are so many bf16 each.
const Kernels& tiled_kernels([[maybe_unused]] Isa isa, int parts) {
  using Of = const Kernels& (*)();
  if constexpr (kEmulatesTiles) {
    constexpr Of emulated[] = {amx_bf16_emulated_kernels, amx_bf16_emulated_fp16_kernels,
                               amx_bf16_emulated_fp32_kernels};
    if (isa == kAmxBf16Emulated) return emulated[parts - 1]();
  }
  constexpr Of tiled[] = {amx_bf16_kernels, amx_bf16_fp16_kernels, amx_bf16_fp32_kernels};
  return tiled[parts - 1]();
}

// Of few rows of bf16.
const Kernels& tiled_few_kernels([[maybe_unused]] Isa isa) {
  if constexpr (kEmulatesTiles) {
    if (isa == kAmxBf16Emulated) return amx_bf16_emulated_few_kernels();
  }
  return amx_bf16_few_kernels();
}

// Whether vectors of fp32 are faster than tiles, three bf16 to a number: of few features, half of which would be
// padding, and on some cores of any.
bool prefers_vectors(Isa isa, const Problem& p) {
  constexpr index_t kNarrow = 16;
  const bool slow = isa == kAmxBf16 && core() == Core::golden_cove;
  return p.dtype == DType::f32 && (slow || max_of(p.D, p.Dv) <= kNarrow);
}

// Kernels with bf16 products, where the set has them and they are of use.
template <class Because>
const Kernels* kernels_of_bf16_products(Isa isa, const Problem& p, const Because& because) {
  if (isa == kAmxBf16 || isa == kAmxBf16Emulated) {
    if (prefers_vectors(isa, p)) {
      because("vectors of fp32 are faster than tiles for head dims up to 16, and on Sapphire and Emerald Rapids");
      return nullptr;
    }
    const std::string tiles = isa == kAmxBf16 ? "the AMX-BF16 tiles" : "an emulation of the AMX-BF16 tiles";
    const int parts = p.dtype == DType::bf16 ? 1 : p.dtype == DType::f16 ? 2 : 3;
    because(std::string(to_string(p.dtype)) + " inputs use " + tiles +
            (parts > 1 ? ", each number as the sum of " + std::to_string(parts) + " bf16" : ""));
    return &tiled_kernels(isa, parts);
  }
  if (p.dtype != DType::bf16) return nullptr;
  if (isa == kAvx512Bf16) {
    because("bfloat16 inputs use the AVX512-BF16 dot product");
    return &avx512_bf16_kernels();
  }
  if (isa == kAvx512 && features().avx512_bf16 && !features().bf16_dot_is_fast)
    because("this processor's AVX512-BF16 dot product is slower than fp32 multiply-adds");
  return nullptr;
}
#elif defined(FLASH_ATTN_ARM64)
template <class Because>
const Kernels* kernels_of_bf16_products(Isa isa, const Problem& p, const Because& because) {
  if (isa != kNeonBf16 || p.dtype != DType::bf16) return nullptr;
  because("bfloat16 inputs use AArch64's bf16 dot product");
  return &neon_bf16_kernels();
}
#endif

const Rotations& rotations() {
#if defined(FLASH_ATTN_X86)
  const Isa isa = current_isa();
  if (isa != kPortable) return isa == kAvx2 ? avx2_rotations() : avx512_rotations();
#elif defined(FLASH_ATTN_ARM64)
  if (current_isa() != kPortable) return neon_rotations();
#endif
  return portable_rotations();
}

#if defined(FLASH_ATTN_X86)
// What processors with tiles take for what is too small for these.
const Kernels& vector_kernels(const Problem& p) {
  return p.dtype == DType::bf16 && features().bf16_dot_is_fast ? avx512_bf16_kernels() : avx512_kernels();
}
#endif

// Of the sequences that have too few rows for `kernels`, forward.
const Kernels& few_rows_kernels([[maybe_unused]] const Problem& p, const Kernels& kernels) {
#if defined(FLASH_ATTN_X86)
  if (kernels.least_rows > 0) {
    return p.dtype == DType::bf16 && kernels.backward.run ? tiled_few_kernels(current_isa()) : vector_kernels(p);
  }
#endif
  return kernels;
}

// Of those that have too few keys for them, or are too short backward.
const Kernels& short_kernels([[maybe_unused]] const Problem& p, const Kernels& kernels) {
#if defined(FLASH_ATTN_X86)
  if (kernels.least_length > 0) return vector_kernels(p);
#endif
  return kernels;
}

const Kernels& choose_kernels(const Problem& p, std::vector<std::string>* reasons) {
  const auto because = [&](std::string why) {
    if (reasons) reasons->push_back(std::move(why));
  };
  const Isa isa = current_isa();
  if (p.dtype == DType::f64) {
    because("float64 is the reference precision: portable code in double precision on every machine");
    return portable_f64_kernels();
  }
  because(std::string("instruction set ") + kIsaNames[isa] +
          (isa == best_isa() ? ": the best that this machine can execute" : ": forced by the debug switch"));
#if defined(FLASH_ATTN_X86) || defined(FLASH_ATTN_ARM64)
  if (const Kernels* const kernels = kernels_of_bf16_products(isa, p, because)) return *kernels;
  if (p.dtype == DType::bf16 || p.dtype == DType::f16)
    because(std::string(to_string(p.dtype)) + " inputs are converted to fp32 while packing");
#endif
#if defined(FLASH_ATTN_X86)
  if (isa == kAvx512Bf16) because("products are in fp32, so bf16 products have no use and the avx512 kernels run");
  if (isa != kAvx2 && isa != kPortable) return avx512_kernels();
  if (isa == kAvx2) return avx2_kernels();
#elif defined(FLASH_ATTN_ARM64)
  if (isa == kNeonBf16) because("products are in fp32, so bf16 products have no use and the neon kernels run");
  if (isa != kPortable) return neon_kernels();
#endif
  return portable_kernels();
}

// The kernels of the longest sequence of a forward pass.
const Kernels& longest_forward_kernels(const Problem& p, const Kernels& chosen, std::vector<std::string>& reasons) {
  const index_t rows = rows_together(p.Sq, p.group());
  const auto because = [&](const Kernels& few, const Kernels& more, const char* sequences) {
    reasons.push_back(sequences + std::string("up to ") + std::to_string(more.least_rows - 1) +
                      " rows of queries per key head " +
                      (few.backward.run ? std::string("run on the ") + few.instruction_set + " kernels"
                                        : "meet tiles of K and V that are not packed"));
  };
  const Kernels* kernels = &chosen;
  if (rows >= kernels->least_rows && (p.Sk < kernels->least_keys || (p.varlen && kernels->least_keys > 0))) {
    const Kernels& few = short_kernels(p, *kernels);
    reasons.push_back((p.Sk < kernels->least_keys ? "up to " : "sequences with up to ") +
                      std::to_string(kernels->least_keys - 1) + " keys run on the " + few.instruction_set + " kernels");
    if (p.Sk < kernels->least_keys) kernels = &few;
  }
  while (rows < kernels->least_rows) {
    const Kernels& few = few_rows_kernels(p, *kernels);
    if (rows >= few.least_rows) because(few, *kernels, "");
    kernels = &few;
  }
  for (const Kernels* more = kernels; p.varlen && more->least_rows > 0;) {
    const Kernels& few = few_rows_kernels(p, *more);
    because(few, *more, "sequences with ");
    more = &few;
  }
  return *kernels;
}

// Of a backward pass, likewise.
const Kernels& longest_backward_kernels(const Problem& p, const Kernels& chosen, std::vector<std::string>& reasons) {
  const bool is_short = shorter_length(p.Sq, p.Sk, p.group()) < chosen.least_length;
  const Kernels& few = short_kernels(p, chosen);
  if (chosen.least_length > 0 && (is_short || p.varlen)) {
    const std::string few_of_both = "up to " + std::to_string(kFewOfBoth) + " queries and as many keys";
    const std::string few_of_one = "up to " + std::to_string(chosen.least_length - 1) +
                                   " queries (counted up to three times where heads share keys) or keys, or ";
    reasons.push_back((is_short ? "" : "sequences with ") + (chosen.least_length > 1 ? few_of_one : std::string()) +
                      few_of_both + " run on the " + few.instruction_set + " kernels");
  }
  return is_short ? few : chosen;
}

const BackwardKernel& backward_kernel(const Problem& p, const Kernels& kernels) {
  constexpr index_t kMostBytes = 512;  // Longer rows are up to 1 % slower by tall strips, and fp32 on a Zen 4.
  const bool gains = core() == Core::zen5 || (core() == Core::zen4 && kernels.elem_size < index_t(sizeof(float)));
  return gains && max_of(p.D, p.Dv) * kernels.elem_size <= kMostBytes ? kernels.tall : kernels.backward;
}

Approach forward_approach(const Problem& p, const Kernels& kernels) {
  const index_t together = rows_together(p.Sq, p.group());
  return together > kernels.in_place_rows ? Approach::packed
         : together > kernels.direct_rows ? Approach::in_place
                                          : Approach::direct;
}

// The tiles of the longest sequence, with the reason where its rows per key head are few.
Tiles forward_tiles_of(const Problem& p, const Kernels& kernels, Approach approach, std::vector<std::string>& reasons) {
  const index_t rows = p.Sq * p.group(), together = rows_together(p.Sq, p.group());
  Tiles tiles = forward_tiles(approach, p.D, p.Dv, kernels.elem_size, kernels.strip_rows, sees_first_keys(p));
  if (approach == Approach::packed) return tiles;
  tiles.queries = together / max_of<index_t>(p.Sq, 1) * p.Sq;
  reasons.push_back(std::to_string(rows) + " rows per key head (queries times query heads of a group): " +
                    (approach == Approach::direct ? "rows of K and V are read where they are"
                                                  : "key blocks are packed as they are used") +
                    (together < rows ? ", for " + std::to_string(tiles.queries) + " of them at a time" : "") +
                    ", in ranges of keys that are merged");
  return tiles;
}

// Those that meet K and V where they are, of a problem some of whose sequences may have so few queries.
const Kernels* direct_kernels(const Problem& p, const Kernels& kernels) {
  if (!may_be_direct(p)) return nullptr;
  if (kernels.backward_direct) return &kernels;
#if defined(FLASH_ATTN_X86)
  if (p.dtype != DType::f64) return &avx512_kernels();
#elif defined(FLASH_ATTN_ARM64)
  if (p.dtype != DType::f64) return &neon_kernels();
#endif
  return nullptr;
}

bool has_any(const Problem& p, const Sequences& sequences) {
  for (index_t b = 0; b < (p.varlen ? p.B : 1); ++b)
    if (sequences.have(p, p.sequence(b))) return true;
  return false;
}

// Of sequences with so many queries that are not folded, by their own lengths, as forward by its rows.
void run_backward(const BackwardProblem& b, const Kernels& kernels, Range queries, const Executor& executor) {
  const Problem& p = b.problem;
  const Kernels* const direct = direct_kernels(p, kernels);
  Sequences sequences{kAny, kAny, kAny, queries, Sequences::Which::direct, kernels.direct_queries};
  if (direct && has_any(p, sequences)) direct->backward_direct(b, sequences, executor);
  sequences.which = Sequences::Which::others;
  if (!has_any(p, sequences)) return;
  sequences.lengths = {kernels.least_length, kAny.end};
  backward_kernel(p, kernels).run(b, sequences, executor);
  sequences.lengths = {0, kernels.least_length};
  if (kernels.least_length > 0) backward_kernel(p, short_kernels(p, kernels)).run(b, sequences, executor);
}

std::string number(index_t n) { return std::to_string(n); }

void name_kernel(const char* pass, const Problem& p, const Kernels& kernels, Explanation& e) {
  e.instruction_set = kernels.instruction_set;
  e.kernel = std::string("cpu.") + pass + "." + to_string(p.dtype) + "." + kernels.instruction_set;
}

void explain_forward(const Problem& p, bool s_dmask, const Kernels& chosen, Explanation& e) {
  const Kernels& kernels = s_dmask ? chosen : longest_forward_kernels(p, chosen, e.reasons);
  const Approach approach = s_dmask ? Approach::packed : forward_approach(p, kernels);
  if (s_dmask) e.reasons.push_back("S_dmask is written from packed keys, however few rows meet them");
  const Tiles tiles = forward_tiles_of(p, kernels, approach, e.reasons);
  name_kernel("forward", p, kernels, e);
  if (!s_dmask && takes_lanes(p, {0, p.Sq, 0, p.Sk}, approach, tiles, kernels.lanes.depth, kernels.elem_size)) {
    e.tile = number(kLaneQueries) + " queries, in the lanes, x up to " + number(kernels.lanes.keys) + " keys, " +
             kernels.arithmetic;
    e.reasons.push_back("rows that see few keys are faster with the queries in the lanes than in strips of rows");
    return;
  }
  e.tile = "blocks of " + number(tiles.queries) + " queries x " + number(tiles.keys) + " keys, in strips of " +
           number(kernels.strip_rows) + " queries x " + number(kernels.panel_columns) + " keys, " + kernels.arithmetic;
  if (takes_pairs(p, approach, kernels.paired_features))
    e.reasons.push_back(
        "half of the features of Q K^T go in pairs, two additions for a product, unless queries and keys are so long "
        "that it would show");
}

void explain_backward(Problem p, const Kernels& chosen, Explanation& e) {
  const auto because = [&](bool possible, bool is, index_t most, const std::string& why) {
    if (is || (p.varlen && possible))
      e.reasons.push_back((p.varlen ? "sequences with up to " : "up to ") + number(most) + " queries" + why);
    return is;
  };
  const Sequence sequence{0, p.Sq, 0, p.Sk};
  if (because(may_fold(p), is_folded(p, sequence), kFoldedQueries,
              ": those of the heads that share a key head are met as those of one head"))
    p = fold_sizes(p);
  const Kernels* const direct = direct_kernels(p, chosen);
  if (because(direct, direct && is_direct(p, {0, p.Sq, 0, p.Sk}, chosen.direct_queries), chosen.direct_queries,
              " meet rows of K and V where they are")) {
    name_kernel("backward", p, *direct, e);
    e.tile = number(p.Sq) + " queries x up to " + number(kDirectKeys) + " keys, " + direct->arithmetic;
    return;
  }
  const Kernels& kernels = longest_backward_kernels(p, chosen, e.reasons);
  const BackwardKernel& backward = backward_kernel(p, kernels);
  const Tiles tiles = backward_tiles(p.D, p.Dv, kernels.elem_size, backward.strip_rows, addend_per_query(p));
  name_kernel("backward", p, kernels, e);
  e.tile = "blocks of " + number(tiles.queries) + " queries x " + number(tiles.keys) + " keys, in strips of " +
           number(backward.strip_rows) + " keys x " + number(backward.panel_columns) + " queries, " +
           kernels.arithmetic;
}

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }

  Explanation explain(const Problem& p, Pass pass, const Executor&) const override {
    Explanation e;
    e.backend = name();
    const Kernels& chosen = choose_kernels(p, &e.reasons);
    if (pass == Pass::backward)
      explain_backward(p, chosen, e);
    else
      explain_forward(p, pass == Pass::forward_and_s_dmask, chosen, e);
    return e;
  }
  void forward(const ForwardProblem& f, const Executor& executor) const override {
    const Kernels* kernels = &choose_kernels(f.problem, nullptr);
    clear_unwritten(f);
    // By a sequence's own rows, so that its bits do not depend on the others of a batch. S_dmask takes packed keys.
    Sequences sequences;
    if (!f.s_dmask) sequences = {{kernels->least_rows, kAny.end}, {kernels->least_keys, kAny.end}, kAny};
    if (sequences.keys.begin > 0) {
      const Sequences few_keys{sequences.rows, {0, kernels->least_keys}, kAny};
      short_kernels(f.problem, *kernels).forward(f, few_keys, executor);
    }
    for (; sequences.rows.end > 0; sequences = {{kernels->least_rows, sequences.rows.begin}, kAny, kAny}) {
      kernels->forward(f, sequences, executor);
      kernels = &few_rows_kernels(f.problem, *kernels);
    }
  }
  void forward_with_cache(const CacheProblem& c, const Executor& executor) const override {
    const Workspace memory(rotated_query_bytes(c));
    ForwardProblem f = c.forward;
    f.problem.q = prepare_cache(c, rotations(), memory.data(), executor);
    forward(f, executor);
  }
  void backward(const BackwardProblem& b, const Executor& executor) const override {
    const Problem& p = b.problem;
    const Kernels& kernels = choose_kernels(p, nullptr);
    clear_unwritten(b);
    for (index_t first = has_any(p, {kAny, kAny, kAny, kAny, Sequences::Which::folded}) ? 0 : p.B; first < p.B;) {
      const FoldedQueries folded(b, first, executor);
      run_backward(folded.problem(), kernels, {1, kAny.end}, executor);
      folded.unfold();
      first = folded.sequences().end;
    }
    run_backward(b, kernels, kAny, executor);
    kernels.table_gradients(b, executor);
  }
  void rotate(const RotaryProblem& r, const Executor& executor) const override {
    cpu::rotate(r, rotations(), executor);
  }
};

}  // namespace
}  // namespace cpu

const Backend& cpu_backend() {
  static const cpu::CpuBackend backend;
  return backend;
}

}  // namespace flash_attn
