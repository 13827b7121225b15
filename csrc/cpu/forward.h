// Forward pass on the CPU: FlashAttention-2, Algorithm 1, over strips.
//
// Many queries per key head: work is cut into waves of (b, hk) units. A wave first packs K and V of its units, then
// runs tasks of (unit, query head of the group, block of queries), each of which walks the key blocks it can see. Few
// queries per key head (decode): packing would cost as much as it saves, so tasks are (unit, range of key blocks),
// which pack a block, let all query heads of the group meet it and go on; then the ranges of a unit are merged
// (flash-decoding, https://pytorch.org/blog/flash-decoding).
// Either way a strip of kRows rows meets a whole key block, so that its scores stay in L1: scores, softmax, O += P * V.
#pragma once

#include <cstring>

#include "core/softmax.h"
#include "core/thread_pool.h"
#include "cpu/direct_rows.h"
#include "cpu/dropout_bytes.h"
#include "cpu/packed_keys.h"
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
  static constexpr index_t kFewRows = 64;  // Rows per unit up to which K and V are packed where they are used, and
  static constexpr index_t kDirectRows = 4 * kRows;  // not packed at all.
  // Sums in another order than backward's, which the reference precision does not allow itself.
  static constexpr bool kMayBeDirect = std::is_same_v<Real, float>;
  static constexpr index_t kDirectKeys = 128;        // Keys of a block then: few, so that heads of one row follow soon.
  static constexpr index_t kSplitKeys = 1024;        // Keys of a range that is merged with others.

 public:
  Forward(const ForwardProblem& forward, const Executor& executor)
      : f_(forward),
        p_(forward.problem),
        executor_(executor),
        format_(row_format<Target>(p_.dtype)),
        units_(p_),
        addend_(p_),
        few_(p_.group() * units_.longest_q() <= kFewRows && !f_.s_dmask),
        direct_(few_ && kMayBeDirect && p_.group() * units_.longest_q() <= kDirectRows),
        products_(direct_products<Target>(p_.dtype)),
        heads_(few_ ? p_.group() : 1),
        tiles_(tiles()),
        packed_(p_, format_, tiles_.keys),
        q_stride_(round_up(p_.D, W)),
        o_stride_(round_up(p_.Dv, W)),
        query_blocks_(ceil_div(units_.longest_q(), tiles_.queries)),
        key_blocks_(ceil_div(units_.longest_k(), tiles_.keys)) {}

  void run() {
    clear_slack_rows(format_, p_, f_.out, p_.varlen ? p_.cu_seqlens_q[p_.B] : 0, p_.Tq, p_.H, p_.Dv);
    fill_slack_lse(p_, static_cast<Real*>(f_.lse), std::numeric_limits<Real>::infinity());
    if (f_.s_dmask) std::memset(f_.s_dmask, 0, static_cast<std::size_t>(p_.B * p_.H * p_.Sq * p_.Sk * format_.size));
    if (query_blocks_ == 0) return;
    if (few_)
      run_few();
    else
      run_many();
  }

 private:
  // Some query heads and queries of a sequence; its rows are (query, head), the heads being neighbours.
  struct Block {
    index_t b, h, heads, first, rows;
    Sequence sequence;
    const ScoreRule<Real>* rules;  // heads
    Elem* packed;
    index_t packed_step;  // Between key blocks; 0 where there is one at a time.
    Range keys;           // What its rows see.

    FA_INLINE index_t head(index_t r) const { return heads == 1 ? h : h + r % heads; }
    FA_INLINE index_t query(index_t r) const { return first + (heads == 1 ? r : r / heads); }
    FA_INLINE const ScoreRule<Real>& rule(index_t r) const { return rules[heads == 1 ? 0 : r % heads]; }
    // The smallest interval that holds all keys that some of the rows see, mask aside.
    Range seen(Range rows_seen) const {
      const Range queries{query(rows_seen.begin), query(rows_seen.end - 1) + 1};
      Range hull = rules[0].visible_keys(queries);
      for (index_t g = 1; g < heads && rules[0].bounds.given(); ++g) {
        const Range other = rules[g].visible_keys(queries);
        if (hull.empty()) hull = other;
        if (!other.empty()) hull = {min_of(hull.begin, other.begin), max_of(hull.end, other.end)};
      }
      return hull;
    }
  };

  struct Scratch {
    Elem* rows;                     // queries x q_stride
    Elem* staging;                  // see PackedKeys
    Elem* packed;                   // One key block, when few but not direct.
    const void **k_rows, **v_rows;  // Addresses of a block's keys, when direct.
    Real* scores;                   // kRows x keys
    Elem* probabilities;            // kRows x keys; the memory of scores when kInPlace
    Real* o;                        // queries x o_stride
    SoftmaxState<Real>* state;
    ScoreRule<Real>* rules;  // heads
    Block* blocks;
    std::uint8_t* dropout;  // keys, rounded up to 256
    Real* addend;           // keys, when there is a bias or a mask
    index_t bytes;
  };

  // What a range of key blocks gives, to be merged.
  struct Partial {
    Real* o;  // rows x o_stride
    SoftmaxState<Real>* state;
    index_t bytes;
  };

  Tiles tiles() const {
    Tiles t = forward_tiles(p_.D, p_.Dv, sizeof(Elem));
    t.keys = min_of(t.keys, round_up(max_of<index_t>(units_.longest_k(), 1), kKeyAlign));
    if (direct_) t.keys = min_of(t.keys, kDirectKeys);
    if (few_) return {max_of<index_t>(1, p_.group() * units_.longest_q()), t.keys};
    // Smaller blocks when there would be too few tasks for the threads: a row's result does not depend on its
    // neighbours.
    while (t.queries > 16 &&
           units_.count() * p_.group() * ceil_div(units_.longest_q(), t.queries) < 4 * index_t(executor_.num_threads))
      t.queries /= 2;
    return t;
  }

  Scratch carve(char* base) const {
    Carver c(base);
    Scratch s{};
    const index_t queries = round_up(tiles_.queries, kRows);
    s.rows = c.take<Elem>(slots_ * queries * q_stride_);
    s.staging = c.take<Elem>(packed_.staging_elems());
    s.packed = c.take<Elem>(few_ && !direct_ ? packed_.block_elems() : 0);
    s.k_rows = c.take<const void*>(direct_ ? tiles_.keys : 0);
    s.v_rows = c.take<const void*>(direct_ ? tiles_.keys : 0);
    s.scores = c.take<Real>(kRows * tiles_.keys);
    s.probabilities = kInPlace ? reinterpret_cast<Elem*>(s.scores) : c.take<Elem>(kRows * tiles_.keys);
    s.o = c.take<Real>(slots_ * queries * o_stride_);
    s.state = c.take<SoftmaxState<Real>>(slots_ * queries);
    s.rules = c.take<ScoreRule<Real>>(slots_ * heads_);
    s.blocks = c.take<Block>(slots_);
    s.dropout = c.take<std::uint8_t>(round_up(tiles_.keys, 256));
    s.addend = c.take<Real>(addend_.given() ? tiles_.keys : 0);
    s.bytes = c.used();
    return s;
  }
  // The part of a scratch that belongs to one of the blocks that are worked on side by side.
  Scratch slot(const Scratch& all, index_t i) const {
    const index_t queries = round_up(tiles_.queries, kRows);
    Scratch s = all;
    s.rows += i * queries * q_stride_;
    s.o += i * queries * o_stride_;
    s.state += i * queries;
    s.rules += i * heads_;
    s.blocks += i;
    return s;
  }
  Partial carve_partial(char* base) const {
    Carver c(base);
    Partial part{};
    part.o = c.take<Real>(tiles_.queries * o_stride_);
    part.state = c.take<SoftmaxState<Real>>(tiles_.queries);
    part.bytes = c.used();
    return part;
  }

  void run_many() {
    const index_t unit_elems = key_blocks_ * packed_.block_elems();
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
        const index_t unit = first + task / key_blocks_, kb = task % key_blocks_;
        const index_t keys = keys_of(p_.sequence(units_.b(unit)), kb);
        if (keys > 0)
          packed_.pack(units_.b(unit), units_.hk(unit), kb * tiles_.keys, keys, {0, keys},
                       packed + (unit - first) * unit_elems + kb * packed_.block_elems(), scratch(worker).staging);
      });
      // Late query blocks see most keys under a causal mask: they go first, so that no thread ends on a long one.
      parallel_for(executor_, n * per_unit, [&](index_t task, int worker) {
        const index_t unit = task / per_unit, g = task % per_unit / query_blocks_;
        const Scratch s = scratch(worker);
        Block& block = begin(first + unit, g, query_blocks_ - 1 - task % query_blocks_, s);
        block.packed = packed + unit * unit_elems;
        block.packed_step = packed_.block_elems();
        attend(block, {0, key_blocks_}, s);
        finish(block, s);
        if (f_.s_dmask) write_dmask(block, s);
      });
    }
  }

  // The ranges of keys depend on lengths and num_splits alone, so results do not depend on threads or on other
  // sequences.
  void run_few() {
    const index_t by_default = ceil_div(units_.longest_k(), kSplitKeys);
    const index_t splits =
        max_of<index_t>(1, min_of<index_t>(p_.num_splits > 0 ? p_.num_splits : by_default, key_blocks_));
    const index_t partial_bytes = carve_partial(nullptr).bytes;
    const index_t wave = units_.wave(splits * partial_bytes);
    // Key heads side by side in a task: their rows are neighbours in memory, which is then read almost in its order.
    slots_ = direct_ ? min_of(p_.Hk, wave) : 1;
    while (slots_ > 1 && units_.count() * splits < 4 * slots_ * index_t(executor_.num_threads)) slots_ /= 2;
    const index_t scratch_bytes = carve(nullptr).bytes;
    const int workers = worker_count(executor_, wave * splits);
    const Workspace memory(workers * scratch_bytes + (splits > 1 ? wave * splits * partial_bytes : 0));
    const auto scratch = [&](int worker) { return carve(memory.data() + worker * scratch_bytes); };
    const auto partial = [&](index_t unit, index_t split) {
      return carve_partial(memory.data() + workers * scratch_bytes + (unit * splits + split) * partial_bytes);
    };

    for (index_t first = 0; first < units_.count(); first += wave) {
      const index_t n = min_of(wave, units_.count() - first);
      parallel_for(executor_, ceil_div(n, slots_) * splits, [&](index_t task, int worker) {
        const index_t unit = task / splits * slots_, split = task % splits;
        const Range blocks{split * key_blocks_ / splits, (split + 1) * key_blocks_ / splits};
        const Scratch s = scratch(worker);
        const index_t side_by_side = min_of(slots_, n - unit);
        for (index_t i = 0; i < side_by_side; ++i) begin(first + unit + i, 0, 0, slot(s, i));
        for (index_t kb = blocks.begin; kb < blocks.end; ++kb)
          for (index_t i = 0; i < side_by_side; ++i) attend(s.blocks[i], {kb, kb + 1}, slot(s, i));
        for (index_t i = 0; i < side_by_side; ++i)
          if (splits == 1)
            finish(s.blocks[i], slot(s, i));
          else
            keep(s.blocks[i], slot(s, i), partial(unit + i, split));
      });
      if (splits == 1) continue;
      parallel_for(executor_, n, [&](index_t unit, int worker) {
        const Scratch s = scratch(worker);
        begin(first + unit, 0, 0, s);
        for (index_t split = 0; split < splits; ++split) merge(s.blocks[0], partial(unit, split), s);
        finish(s.blocks[0], s);
      });
    }
  }

  // Keys of block kb; none or fewer past the end of a sequence.
  index_t keys_of(const Sequence& sequence, index_t kb) const {
    return min_of(tiles_.keys, sequence.k_len - kb * tiles_.keys);
  }

  // Sets up a block, which may have no rows, and an empty state of its rows.
  Block& begin(index_t unit, index_t g, index_t query_block, const Scratch& s) const {
    Block& block = *s.blocks;
    block = {};
    block.b = units_.b(unit);
    block.heads = heads_;
    block.h = units_.hk(unit) * p_.group() + g;
    block.first = query_block * tiles_.queries;
    block.packed = s.packed;
    block.sequence = p_.sequence(block.b);
    block.rows = min_of(tiles_.queries, (block.sequence.q_len - block.first) * heads_);
    if (block.rows <= 0) {
      block.rows = 0;
      return block;
    }
    for (index_t n = 0; n < heads_; ++n) s.rules[n] = p_.template score_rule<Real>(block.b, block.h + n);
    block.rules = s.rules;
    block.keys = block.seen({0, block.rows});

    const index_t padded = round_up(block.rows, kRows);
    for (index_t r = 0; r < block.rows; r += heads_ == 1 ? block.rows : heads_) {
      const index_t row = block.sequence.q_begin + block.query(r);
      const bool last = heads_ == 1 || r + heads_ == block.rows;
      load_rows(format_, row_at(p_.q, format_.size, block.b, row, block.h),
                (heads_ == 1 ? p_.q.row_stride : p_.q.head_stride) * format_.size, heads_ == 1 ? block.rows : heads_,
                last ? padded - r : heads_, p_.D, q_stride_, s.rows + r * q_stride_);
    }
    fill(s.o, 0, padded * o_stride_, Real(0));
    for (index_t r = 0; r < padded; ++r) s.state[r] = {};
    return block;
  }

  void attend(const Block& block, Range key_blocks, const Scratch& s) const {
    if (block.rows == 0 || block.keys.empty()) return;
    const index_t first = max_of(key_blocks.begin, block.keys.begin / tiles_.keys);
    const index_t last = min_of(key_blocks.end, ceil_div(block.keys.end, tiles_.keys));
    for (index_t kb = first; kb < last; ++kb) {
      if (hidden(block, kb)) continue;
      if (direct_)
        find_rows(block, kb, s);
      else if (few_)
        pack_seen(block, kb, s);
      for (index_t r = 0; r < block.rows; r += kRows) strip(block, kb, r, s);
    }
  }

  void find_rows(const Block& block, index_t kb, const Scratch& s) const {
    const index_t origin = kb * tiles_.keys, keys = keys_of(block.sequence, kb), hk = block.h / p_.group();
    const index_t begin = max_of<index_t>(block.keys.begin - origin, 0) / W * W;
    for (index_t n = begin; n < keys;) {
      const KeyRun run = p_.keys_from(block.sequence, block.b, origin + n);
      const char* k = row_at(p_.k, format_.size, run.batch, run.row, hk);
      const char* v = row_at(p_.v, format_.size, run.batch, run.row, hk);
      for (const index_t end = min_of(n + run.count, keys); n < end; ++n) {
        s.k_rows[n] = k;
        s.v_rows[n] = v;
        if (n - begin < kPrefetchKeys) {
          prefetch_row(k, p_.D * format_.size);
          prefetch_row(v, p_.Dv * format_.size);
        }
        k += p_.k.row_stride * format_.size;
        v += p_.v.row_stride * format_.size;
      }
    }
  }

  void pack_seen(const Block& block, index_t kb, const Scratch& s) const {
    const index_t origin = kb * tiles_.keys, keys = keys_of(block.sequence, kb);
    packed_.pack(block.b, block.h / p_.group(), origin, keys,
                 {max_of<index_t>(block.keys.begin - origin, 0), min_of(block.keys.end - origin, keys)}, block.packed,
                 s.staging);
  }

  // Whether the mask hides a whole key block from all rows.
  bool hidden(const Block& block, index_t kb) const {
    if (!block.rules[0].mask.given()) return false;
    const Range keys{kb * tiles_.keys, kb * tiles_.keys + keys_of(block.sequence, kb)};
    const Range queries{block.first, block.query(block.rows - 1) + 1};
    for (index_t n = 0; n < block.heads; ++n)
      if (block.rules[n].cover(queries, keys) != Cover::none) return false;
    return true;
  }

  void keep(const Block& block, const Scratch& s, const Partial& part) const {
    std::memcpy(part.o, s.o, static_cast<std::size_t>(block.rows * o_stride_) * sizeof(Real));
    for (index_t r = 0; r < block.rows; ++r) part.state[r] = s.state[r];
  }

  void merge(const Block& block, const Partial& part, const Scratch& s) const {
    for (index_t r = 0; r < block.rows; ++r) {
      Real factor, factor_part;
      s.state[r].merge(part.state[r], factor, factor_part);
      Real* const o = s.o + r * o_stride_;
      for (index_t n = 0; n < o_stride_; n += W)
        Simd::store(o + n, fma(Simd::load(part.o + r * o_stride_ + n), V(factor_part), Simd::load(o + n) * V(factor)));
    }
  }

  // The part of a key block that a strip of queries sees, as columns of the block.
  struct Columns {
    index_t origin;       // Key of column 0.
    index_t begin, end;   // Whole vectors around what is visible.
    index_t first, last;  // The panels that cover them.
    index_t keys;         // Keys in the block.
  };
  bool columns(const Block& block, index_t kb, Range rows, Columns& c) const {
    const Range seen = block.seen(rows);
    c.origin = kb * tiles_.keys;
    c.keys = keys_of(block.sequence, kb);
    const index_t begin = max_of<index_t>(seen.begin - c.origin, 0), end = min_of(seen.end - c.origin, c.keys);
    if (begin >= end) return false;
    const Panels<Target> panels = packed_.k(block.packed, c.keys);
    c.first = panels.at(begin);
    c.last = panels.at(end - 1) + 1;
    c.begin = begin / W * W;
    c.end = round_up(end, W);
    return true;
  }

  void scores(const Block& block, index_t kb, index_t r, const Columns& c, const Scratch& s) const {
    if (direct_)
      return products_.dots(s.rows + r * q_stride_, q_stride_, p_.D, s.k_rows, c.begin, min_of(c.end, c.keys), s.scores,
                            tiles_.keys);
    multiply_strip<Target>({s.rows + r * q_stride_, q_stride_, kStep},
                           packed_.k(block.packed + kb * block.packed_step, c.keys), 0, packed_.depth(), c.first,
                           c.last, s.scores, tiles_.keys, false);
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
    if (direct_)
      return products_.accumulate(s.probabilities, tiles_.keys, s.v_rows, c.begin, min_of(c.end, c.keys), p_.Dv,
                                  s.o + r * o_stride_, o_stride_);
    const Panels<Target> v = packed_.v(block.packed + kb * block.packed_step, c.keys);
    multiply_strip<Target>({s.probabilities + c.begin, tiles_.keys, kStep}, v, c.begin, c.end, 0, v.count(),
                           s.o + r * o_stride_, o_stride_, true);
  }

  // Scores of query row r in log2 units, -inf where it sees nothing. Returns the factor that is still to be applied.
  Real mask_and_transform(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.query(r);
    const ScoreRule<Real>& rule = block.rule(r);
    Real factor = rule.scale_log2;
    if (addend_.given()) {
      addend_.row(rule, block.b, block.head(r), i, {c.origin + c.begin, c.origin + min_of(c.end, c.keys)},
                  s.addend + c.begin);
      fill(s.addend, min_of(c.end, c.keys), c.end, Real(0));
      V distance = V(Real(rule.diagonal(i) - c.origin - c.begin)) - Simd::iota();
      for (index_t n = c.begin; n < c.end; n += W, distance = distance - V(Real(W)))
        Simd::store(x + n, rule.logit(Simd::load(x + n), distance, Simd::load(s.addend + n)));
      factor = Real(1);
    } else if (rule.has_softcap() || rule.has_alibi() || !(rule.scale_log2 > Real(0))) {
      V distance = V(Real(rule.diagonal(i) - c.origin - c.begin)) - Simd::iota();
      for (index_t n = c.begin; n < c.end; n += W, distance = distance - V(Real(W)))
        Simd::store(x + n, rule.logit(Simd::load(x + n), distance));
      factor = Real(1);
    }
    const Range seen = rule.visible_keys(i);
    const index_t begin = min_of(max_of(seen.begin - c.origin, c.begin), c.end);
    const index_t end = max_of(min_of(seen.end - c.origin, c.end), begin);
    fill(x, c.begin, begin, -std::numeric_limits<Real>::infinity());
    fill(x, end, c.end, -std::numeric_limits<Real>::infinity());
    return factor;
  }

  void softmax(const Block& block, index_t r, const Columns& c, Real* x, Elem* probabilities, const Scratch& s) const {
    const Real factor = mask_and_transform(block, r, c, x, s);
    V top = Simd::load(x + c.begin);
    for (index_t n = c.begin + W; n < c.end; n += W) top = vmax(top, Simd::load(x + n));
    SoftmaxState<Real>& state = s.state[r];
    const Real rescale = state.raise(Simd::reduce_max(top) * factor);
    if (rescale != Real(1)) {
      Real* const o = s.o + r * o_stride_;
      for (index_t n = 0; n < o_stride_; n += W) Simd::store(o + n, Simd::load(o + n) * V(rescale));
    }
    const DropoutRule& dropout = p_.dropout;
    if (dropout.active)
      dropout_row<Target>(dropout, block.b, block.head(r), block.query(r), c.origin, c.end, s.dropout);
    const V shift = V(-state.shift());
    V sum = V(Real(0));
    for (index_t n = c.begin; n < c.end; n += W) {
      V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      sum = sum + p;
      if (dropout.active) p = Simd::keep_where(p, s.dropout + n, dropout.keep_threshold);
      Format::store(probabilities + n, p);
    }
    state.l += Simd::reduce_sum(sum);
  }

  void finish(const Block& block, const Scratch& s) const {
    for (index_t r = 0; r < block.rows; ++r) {
      const index_t h = block.head(r), i = block.query(r);
      SoftmaxState<Real>& state = s.state[r];
      // The sink is one more key, of value 0.
      const SoftmaxState<Real> sink{p_.sink ? sink_log2<Target>(p_, h) : Real(0), Real(1)};
      Real factor = Real(1), unused;
      if (p_.sink && sink.m > -std::numeric_limits<Real>::infinity()) state.merge(sink, factor, unused);
      static_cast<Real*>(f_.lse)[p_.lse_offset(block.b, h) + i] = state.lse();
      format_.store(s.o + r * o_stride_, factor * state.finish() * Real(p_.dropout.keep_scale), p_.Dv,
                    row_at(f_.out, format_.size, block.b, block.sequence.q_begin + i, h));
    }
  }

  // exp(score - row maximum), negative where dropped: a second walk, now that the maxima are known.
  void write_dmask(const Block& block, const Scratch& s) const {
    for (index_t kb = 0; kb * tiles_.keys < block.keys.end; ++kb)
      for (index_t r = 0; r < block.rows; r += kRows) {
        const index_t rows = min_of(kRows, block.rows - r);
        Columns c{};
        if (!columns(block, kb, {r, r + rows}, c)) continue;
        scores(block, kb, r, c, s);
        for (index_t n = 0; n < rows; ++n) write_dmask_row(block, r + n, c, s.scores + n * tiles_.keys, s);
      }
  }

  void write_dmask_row(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.first + r;
    const Real factor = mask_and_transform(block, r, c, x, s);
    dropout_row<Target>(p_.dropout, block.b, block.h, i, c.origin, c.end, s.dropout);
    const V shift = V(-s.state[r].shift());
    for (index_t n = c.begin; n < c.end; n += W) {
      const V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      const V kept = Simd::keep_where(p, s.dropout + n, p_.dropout.keep_threshold);
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
  const bool few_, direct_;
  const DirectProducts<Target> products_;
  const index_t heads_;  // Query heads whose rows share a block.
  const Tiles tiles_;
  const PackedKeys<Target> packed_;
  const index_t q_stride_, o_stride_;
  const index_t query_blocks_, key_blocks_;
  index_t slots_ = 1;  // Blocks that a worker has in work side by side.
};

}  // namespace flash_attn::cpu
