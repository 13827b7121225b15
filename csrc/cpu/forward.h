// Forward pass on the CPU: FlashAttention-2, Algorithm 1, over strips.
//
// Work is cut into waves of (b, hk) units. A wave first packs K and V of its units, then runs tasks of (unit, query
// head of the group, block of queries), each of which walks the key blocks it can see. Inside a task a strip of kRows
// queries meets a whole key block, so that its scores stay in L1: scores, softmax, O += P * V.
#pragma once

#include <cstring>

#include "core/softmax.h"
#include "core/thread_pool.h"
#include "cpu/dropout_bits.h"
#include "cpu/pack.h"
#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

template <class Target>
class Forward {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  static constexpr index_t W = Simd::W, kStep = Format::kStep, kRows = Target::kRows;
  static constexpr bool kInPlace = std::is_same_v<Elem, Real>;  // P can overwrite the scores.

 public:
  Forward(const ForwardProblem& forward, const Executor& executor)
      : f_(forward),
        p_(forward.problem),
        executor_(executor),
        format_(row_format<Target>(p_.dtype)),
        units_(p_),
        addend_(p_),
        tiles_(forward_tiles(p_.D, p_.Dv, sizeof(Elem))),
        depth_(round_up(p_.D, kStep)),
        q_stride_(round_up(p_.D, W)),
        o_stride_(round_up(p_.Dv, W)) {
    tiles_.keys = min_of(tiles_.keys, round_up(max_of<index_t>(units_.longest_k(), 1), kKeyAlign));
    // Smaller blocks when there would be too few tasks for the threads: a row's result does not depend on its
    // neighbours.
    while (tiles_.queries > 16 && units_.count() * p_.group() * ceil_div(units_.longest_q(), tiles_.queries) <
                                      4 * index_t(executor.num_threads))
      tiles_.queries /= 2;
    query_blocks_ = ceil_div(units_.longest_q(), tiles_.queries);
    key_blocks_ = ceil_div(units_.longest_k(), tiles_.keys);
  }

  void run() {
    clear_slack_rows(format_, p_, f_.out, p_.varlen ? p_.cu_seqlens_q[p_.B] : 0, p_.Tq, p_.H, p_.Dv);
    fill_slack_lse(p_, static_cast<Real*>(f_.lse), std::numeric_limits<Real>::infinity());
    if (f_.s_dmask) std::memset(f_.s_dmask, 0, static_cast<std::size_t>(p_.B * p_.H * p_.Sq * p_.Sk * format_.size));
    if (query_blocks_ == 0) return;

    const index_t unit_elems = key_blocks_ * tiles_.keys * (depth_ + o_stride_);
    const index_t wave = units_.wave(unit_elems * index_t(sizeof(Elem)));
    const index_t per_unit = p_.group() * query_blocks_;
    const int workers = worker_count(executor_, wave * max_of(per_unit, key_blocks_));
    const index_t packed_bytes = round_up(wave * unit_elems * index_t(sizeof(Elem)), kCacheLine);
    const index_t scratch_bytes = carve(nullptr).bytes;
    const Workspace memory(packed_bytes + workers * scratch_bytes);
    auto* const packed = reinterpret_cast<Elem*>(memory.data());
    const auto scratch = [&](int worker) { return carve(memory.data() + packed_bytes + worker * scratch_bytes); };

    for (index_t first = 0; first < units_.count(); first += wave) {
      const index_t n = min_of(wave, units_.count() - first);
      parallel_for(executor_, n * key_blocks_, [&](index_t task, int worker) {
        const index_t unit = task / key_blocks_;
        pack(first + unit, packed + unit * unit_elems, task % key_blocks_, scratch(worker));
      });
      // Late query blocks see most keys under a causal mask: they go first, so that no thread ends on a long one.
      parallel_for(executor_, n * per_unit, [&](index_t task, int worker) {
        const index_t unit = task / per_unit, g = task % per_unit / query_blocks_;
        attend(first + unit, packed + unit * unit_elems, g, query_blocks_ - 1 - task % query_blocks_, scratch(worker));
      });
    }
  }

 private:
  struct Scratch {
    Elem* rows;           // Queries x q_stride; while packing keys x the larger stride.
    Real* scores;         // kRows x keys
    Elem* probabilities;  // kRows x keys; the memory of scores when kInPlace
    Real* o;              // queries x o_stride
    SoftmaxState<Real>* state;
    std::uint8_t* dropout;  // a bit each: keys, rounded up to 256
    Real* addend;           // keys, when there is a bias or a mask
    index_t bytes;
  };

  // One (sequence, head, block of queries).
  struct Block {
    index_t b, h, first, rows;
    Sequence sequence;
    ScoreRule<Real> rule;
    Elem* packed;
    Range keys;  // What its queries see.
  };

  Scratch carve(char* base) const {
    Carver c(base);
    Scratch s{};
    const index_t queries = round_up(tiles_.queries, kRows);
    s.rows = c.take<Elem>(max_of(queries * q_stride_, tiles_.keys * max_of(q_stride_, o_stride_)));
    s.scores = c.take<Real>(kRows * tiles_.keys);
    s.probabilities = kInPlace ? reinterpret_cast<Elem*>(s.scores) : c.take<Elem>(kRows * tiles_.keys);
    s.o = c.take<Real>(queries * o_stride_);
    s.state = c.take<SoftmaxState<Real>>(queries);
    s.dropout = c.take<std::uint8_t>(round_up(tiles_.keys, 256) / 8);
    s.addend = c.take<Real>(addend_.given() ? tiles_.keys : 0);
    s.bytes = c.used();
    return s;
  }

  Panels<Target> k_panels(Elem* unit, index_t block, index_t keys) const {
    return {unit + block * tiles_.keys * (depth_ + o_stride_), depth_, round_up(keys, W)};
  }
  Panels<Target> v_panels(Elem* unit, index_t block, index_t keys) const {
    return {unit + block * tiles_.keys * (depth_ + o_stride_) + tiles_.keys * depth_, round_up(keys, W), o_stride_};
  }

  void pack(index_t unit, Elem* packed, index_t block, const Scratch& s) const {
    const index_t b = units_.b(unit), hk = units_.hk(unit);
    const Sequence sequence = p_.sequence(b);
    const index_t first = block * tiles_.keys;
    if (first >= sequence.k_len) return;
    const index_t keys = min_of(tiles_.keys, sequence.k_len - first), padded = round_up(keys, W);
    load_keys(format_, p_, p_.k, b, hk, first, keys, padded, p_.D, q_stride_, s.rows);
    pack_transposed(s.rows, q_stride_, k_panels(packed, block, keys));
    load_keys(format_, p_, p_.v, b, hk, first, keys, padded, p_.Dv, o_stride_, s.rows);
    pack_direct(s.rows, o_stride_, v_panels(packed, block, keys));
  }

  void attend(index_t unit, Elem* packed, index_t g, index_t query_block, const Scratch& s) const {
    Block block{};
    block.b = units_.b(unit);
    block.h = units_.hk(unit) * p_.group() + g;
    block.first = query_block * tiles_.queries;
    block.sequence = p_.sequence(block.b);
    if (block.first >= block.sequence.q_len) return;
    block.rows = min_of(tiles_.queries, block.sequence.q_len - block.first);
    block.rule = p_.score_rule<Real>(block.b, block.h);
    block.packed = packed;
    block.keys = block.rule.visible_keys(Range{block.first, block.first + block.rows});

    const index_t padded = round_up(block.rows, kRows);
    load_rows(format_, row_at(p_.q, format_.size, block.b, block.sequence.q_begin + block.first, block.h),
              p_.q.row_stride * format_.size, block.rows, padded, p_.D, q_stride_, s.rows);
    fill(s.o, 0, padded * o_stride_, Real(0));
    for (index_t r = 0; r < padded; ++r) s.state[r] = {};

    if (!block.keys.empty())
      for (index_t kb = block.keys.begin / tiles_.keys; kb * tiles_.keys < block.keys.end; ++kb)
        if (!hidden(block, kb)) {
          load_shared_addend(block, kb, s);
          for (index_t r = 0; r < block.rows; r += kRows) strip(block, kb, r, s);
        }
    finish(block, s);
    if (f_.s_dmask) write_dmask(block, s);
  }

  // Whether the mask hides a whole key block from a whole block of queries.
  bool hidden(const Block& block, index_t kb) const {
    const Range keys{kb * tiles_.keys, min_of((kb + 1) * tiles_.keys, block.sequence.k_len)};
    return block.rule.mask.given() && block.rule.cover({block.first, block.first + block.rows}, keys) == Cover::none;
  }

  // What is added to the scores of a key block, where that is the same for all queries.
  void load_shared_addend(const Block& block, index_t kb, const Scratch& s) const {
    const index_t origin = kb * tiles_.keys;
    if (addend_.given() && !addend_.per_query())
      addend_.row(block.rule, block.b, block.h, block.first, 0,
                  {origin, min_of(origin + tiles_.keys, block.sequence.k_len)}, s.addend);
  }

  // The part of a key block that a strip of queries sees, as columns of the block.
  struct Columns {
    index_t origin;       // Key of column 0.
    index_t begin, end;   // Whole vectors around what is visible.
    index_t first, last;  // The panels that cover them.
    index_t keys;         // Keys in the block.
  };
  bool columns(const Block& block, index_t kb, Range rows, Columns& c) const {
    const Range seen = block.rule.visible_keys(Range{block.first + rows.begin, block.first + rows.end});
    c.origin = kb * tiles_.keys;
    c.keys = min_of(tiles_.keys, block.sequence.k_len - c.origin);
    const index_t begin = max_of<index_t>(seen.begin - c.origin, 0), end = min_of(seen.end - c.origin, c.keys);
    if (begin >= end) return false;
    const Panels<Target> panels = k_panels(block.packed, kb, c.keys);
    c.first = panels.at(begin);
    c.last = panels.at(end - 1) + 1;
    c.begin = begin / W * W;
    c.end = round_up(end, W);
    return true;
  }

  void scores(const Block& block, index_t kb, index_t r, const Columns& c, const Scratch& s) const {
    multiply_strip<Target>({s.rows + r * q_stride_, q_stride_, kStep}, k_panels(block.packed, kb, c.keys), 0, depth_,
                           c.first, c.last, s.scores, tiles_.keys, false);
  }

  void strip(const Block& block, index_t kb, index_t r, const Scratch& s) const {
    const index_t rows = min_of(kRows, block.rows - r);
    Columns c{};
    if (!columns(block, kb, {r, r + rows}, c)) return;
    scores(block, kb, r, c, s);
    for (index_t n = 0; n < kRows; ++n) {
      if (n < rows)
        softmax(block, r + n, c, s.scores + n * tiles_.keys, s.probabilities + n * tiles_.keys, s);
      else
        fill(s.probabilities + n * tiles_.keys, c.begin, c.end, Elem{});
    }
    const Panels<Target> v = v_panels(block.packed, kb, c.keys);
    multiply_strip<Target>({s.probabilities + c.begin, tiles_.keys, kStep}, v, c.begin, c.end, 0, v.count(),
                           s.o + r * o_stride_, o_stride_, true);
  }

  struct Scaled {
    Real factor, top;
  };
  // Turns dot products of query row r into scores, -inf where it sees nothing. In log2 units once multiplied by
  // `factor`; `top` is their maximum.
  Scaled mask_and_transform(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.first + r;
    const ScoreRule<Real> rule = block.rule;  // A copy, which no store to x can change.
    if (addend_.given() && addend_.per_query())
      addend_.row(rule, block.b, block.h, i, r + kRows < block.rows ? kRows : 0,
                  {c.origin + c.begin, c.origin + min_of(c.end, c.keys)}, s.addend + c.begin);
    const Real* const addend = addend_.given() ? s.addend : nullptr;
    const bool plain = !addend && !rule.has_softcap() && !rule.has_alibi() && rule.scale_log2 > Real(0);
    const auto transform = [&](index_t from, index_t to) {
      V top = V(-std::numeric_limits<Real>::infinity());
      V distance = V(Real(rule.diagonal(i) - c.origin - from)) - Simd::iota();
      for (index_t n = from; n < to; n += W, distance = distance - V(Real(W))) {
        V score = rule.logit(Simd::load(x + n), distance);
        if (addend) score = score + Simd::load(addend + n);
        Simd::store(x + n, score);
        top = vmax(top, score);
      }
      return top;
    };
    const auto maximum = [&](V top, index_t from, index_t to) {
      for (index_t n = from; n < to; n += W) top = vmax(top, Simd::load(x + n));
      return top;
    };
    const Range seen = rule.visible_keys(i);
    const index_t begin = min_of(max_of(seen.begin - c.origin, c.begin), c.end);
    const index_t end = max_of(min_of(seen.end - c.origin, c.end), begin);
    // Vectors of visible keys alone give their maximum on the way.
    const index_t inner = min_of(round_up(begin, W), c.end), inner_end = max_of(end / W * W, inner);
    V top;
    if (plain) {
      top = maximum(V(-std::numeric_limits<Real>::infinity()), inner, inner_end);
    } else {
      transform(c.begin, inner);
      top = transform(inner, inner_end);
      transform(inner_end, c.end);
    }
    fill(x, c.begin, begin, -std::numeric_limits<Real>::infinity());
    fill(x, end, c.end, -std::numeric_limits<Real>::infinity());
    top = maximum(maximum(top, c.begin, inner), inner_end, c.end);
    return {plain ? rule.scale_log2 : Real(1), Simd::reduce_max(top)};
  }

  void softmax(const Block& block, index_t r, const Columns& c, Real* x, Elem* probabilities, const Scratch& s) const {
    const auto [factor, top] = mask_and_transform(block, r, c, x, s);
    SoftmaxState<Real>& state = s.state[r];
    const Real rescale = state.raise(top * factor);
    if (rescale != Real(1)) {
      Real* const o = s.o + r * o_stride_;
      for (index_t n = 0; n < o_stride_; n += W) Simd::store(o + n, Simd::load(o + n) * V(rescale));
    }
    const DropoutRule dropout = p_.dropout;
    if (dropout.active) dropout_row<Simd>(dropout, block.b, block.h, block.first + r, c.origin, c.end, s.dropout);
    const V shift = V(-state.shift());
    V sum = V(Real(0));
    for (index_t n = c.begin; n < c.end; n += W) {
      V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      sum = sum + p;
      if (dropout.active) p = Simd::keep_where(p, s.dropout, n);
      Format::store(probabilities + n, p);
    }
    state.l += Simd::reduce_sum(sum);
  }

  void finish(const Block& block, const Scratch& s) const {
    Real* const lse = static_cast<Real*>(f_.lse) + p_.lse_offset(block.b, block.h) + block.first;
    // The sink is one more key, of value 0.
    const SoftmaxState<Real> sink{p_.sink ? sink_log2<Target>(p_, block.h) : Real(0), Real(1)};
    const bool has_sink = p_.sink && sink.m > -std::numeric_limits<Real>::infinity();
    for (index_t r = 0; r < block.rows; ++r) {
      SoftmaxState<Real>& state = s.state[r];
      Real factor = Real(1), unused;
      if (has_sink) state.merge(sink, factor, unused);
      lse[r] = state.lse();
      format_.store(s.o + r * o_stride_, factor * state.finish() * Real(p_.dropout.keep_scale), p_.Dv,
                    row_at(f_.out, format_.size, block.b, block.sequence.q_begin + block.first + r, block.h));
    }
  }

  // exp(score - row maximum), negative where dropped: a second walk, now that the maxima are known.
  void write_dmask(const Block& block, const Scratch& s) const {
    for (index_t kb = 0; kb * tiles_.keys < block.keys.end; ++kb) {
      load_shared_addend(block, kb, s);
      for (index_t r = 0; r < block.rows; r += kRows) {
        const index_t rows = min_of(kRows, block.rows - r);
        Columns c{};
        if (!columns(block, kb, {r, r + rows}, c)) continue;
        scores(block, kb, r, c, s);
        for (index_t n = 0; n < rows; ++n) write_dmask_row(block, r + n, c, s.scores + n * tiles_.keys, s);
      }
    }
  }

  void write_dmask_row(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.first + r;
    const Real factor = mask_and_transform(block, r, c, x, s).factor;
    dropout_row<Simd>(p_.dropout, block.b, block.h, i, c.origin, c.end, s.dropout);
    const V shift = V(-s.state[r].shift());
    for (index_t n = c.begin; n < c.end; n += W) {
      const V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      const V kept = Simd::keep_where(p, s.dropout, n);
      Simd::store(x + n, kept + kept - p);
    }
    const index_t row = ((block.b * p_.H + block.h) * p_.Sq + i) * p_.Sk + c.origin + c.begin;
    format_.store(x + c.begin, Real(1), min_of(c.end, c.keys) - c.begin,
                  static_cast<char*>(f_.s_dmask) + row * format_.size);
  }

  const ForwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const RowFormat<Target> format_;
  const Units units_;
  const Addend<Target> addend_;
  Tiles tiles_;
  const index_t depth_, q_stride_, o_stride_;
  index_t query_blocks_ = 0, key_blocks_ = 0;
};

}  // namespace flash_attn::cpu
