// A block of rows that see few keys (lanes.h), with the queries in the lanes.
//
// What a strip of rows (forward_strips.h) does once, reductions, edges and exp2 that no product hides, does not show
// beside thousands of keys, and does beside a few hundred. Here a group of queries, two vectors of them, meets tiles of
// keys: S^T = K Q^T, O^T += V^T P^T, with K^T and V packed as for strips. Maxima and sums are lane by lane, and what is
// read of K and V serves 32 rows instead of 4. exp2 of a tile runs beside the products of V with the tile before, be
// that another group's.
//
// Groups begin at multiples of their size, and what a group sees decides on its tiles, so that no result depends on how
// queries are cut into blocks.
#pragma once

#include "cpu/forward_block.h"

namespace flash_attn::cpu {

// exp2 of a tile's scores, k-step by k-step, in parts that run beside products.
template <class Target>
struct LaneWeights {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  static constexpr index_t W = Simd::W, kStep = Target::Format::kStep, kQueries = Lanes<Target>::kQueries;
  static constexpr int N = Lanes<Target>::kVectors;

  const Real* x;
  Elem* weights;
  index_t left;  // k-steps
  V factor, shift[N], sum[N];

  // Vector n of the k-step in work.
  template <int n>
  FA_INLINE void weigh() {
    V w[kStep];
    for (index_t k = 0; k < kStep; ++k) {
      w[k] = softmax_weight_beside_products(fma(Simd::load(x + k * kQueries + n * W), factor, shift[n]));
      sum[n] = sum[n] + w[k];
    }
    Target::Format::store_step(weights + n * W * kStep, w);
  }
  FA_INLINE void go_on() { x += kStep * kQueries, weights += kStep * kQueries, --left; }
  FA_INLINE void weigh_rest() {
    for (; left > 0; go_on()) weigh<0>(), weigh<1>();
  }
};

template <class Target>
class ForwardLanes {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  using Weights = LaneWeights<Target>;
  // Keys, or features, of a micro-kernel: with the vectors of queries they fill the registers with accumulators.
  static constexpr int kRows = 8, N = Lanes<Target>::kVectors;
  template <int Vectors>
  using MicroKernel = flash_attn::cpu::Target<Simd, Format, kRows * N / Vectors, Vectors>;
  static constexpr index_t W = Simd::W, kStep = Format::kStep;
  static constexpr index_t kQueries = Lanes<Target>::kQueries, kKeys = Lanes<Target>::kKeys;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  explicit ForwardLanes(const ForwardPlan<Target>& plan) : plan_(plan) {}

  void attend(const Block& block, const Scratch& s) const {
    Group groups[2];  // The one in work, and that of the tile before.
    Tile before{};
    index_t nth = 0, which = 0;
    for (index_t r = 0; r < block.rows; r += kQueries) {
      const Range seen = block.seen({r, min_of(r + kQueries, block.rows)});
      if (seen.empty()) continue;
      Group& group = groups[which ^= 1];
      group.begin(r);
      StripAsks asks(s.block->next, kQueries / Target::kRows);
      pack_transposed_panel<Target>({block.q + r * block.q_stride, block.q_stride}, plan_.packed.depth() / kStep,
                                    kQueries, s.lanes.queries);
      const Range keys{seen.begin / kRows * kRows, round_up(seen.end, index_t(kRows))};
      const index_t tiles = ceil_div(keys.end - keys.begin, kKeys);
      const index_t of_tile = round_up(ceil_div(keys.end - keys.begin, tiles), index_t(kRows));
      for (index_t key = keys.begin; key < keys.end; key += of_tile, ++nth) {
        const index_t end = min_of(key + of_tile, keys.end);
        Tile tile{&group,
                  {key, end},
                  seen_by_both(block, r, {key, end}),
                  s.lanes.weights[nth % 2],
                  key == keys.begin,
                  end == keys.end,
                  {}};
        Real* const x = s.lanes.scores[nth % 2];
        V top[N];
        dot_products(block, tile, x, top, asks, s);
        Weights weights = begin_softmax(block, tile, x, top);
        if (before.group) finish(block, before, weights, s);
        weights.weigh_rest();
        for (int n = 0; n < N; ++n) group.l[n] = fma(group.l[n], tile.rescale[n], weights.sum[n]);
        before = tile;
      }
      asks.ask_rest();
    }
    Weights none{};
    if (before.group) finish(block, before, none, s);
  }

 private:
  // Softmax states of kQueries rows from row r on, and maxima as in SoftmaxState.
  struct Group {
    index_t r;
    V m[N], l[N];

    FA_INLINE void begin(index_t row) {
      r = row;
      for (int n = 0; n < N; ++n) m[n] = V(-kInfinity), l[n] = V(Real(0));
    }
  };
  struct Tile {
    Group* group;
    Range keys;  // Whole micro-kernels.
    Range both;  // Of them, those whose V both vectors of queries meet: the first alone those before, the second alone
                 // those after.
    Elem* weights;
    bool first, last;  // Of its group.
    V rescale[N];      // Of what was summed before.
  };
  // Keys of a micro-kernel that not all lanes see: the first is seen by lanes from begin to end, each next one by those
  // one further on, and none from key `keys` on.
  struct Edges {
    index_t begin, end, keys;

    FA_INLINE V hide(V scores, index_t key, index_t vector) const {
      const V lane = Simd::iota() + V(Real(vector * W - key)), hidden(-kInfinity);
      return key < keys ? select_between(lane, V(Real(begin)), V(Real(end)), scores, hidden) : hidden;
    }
  };
  struct NoEdges {
    FA_INLINE V hide(V scores, index_t, index_t) const { return scores; }
  };

  // Of a tile's keys all but those at its ends that one vector of queries does not see, if these are worth a loop.
  // Queries past the last one would see keys as much further on, so they hide none from those before them.
  Range seen_by_both(const Block& block, index_t r, Range keys) const {
    static_assert(N == 2);
    constexpr index_t kLeast = 4 * kStep;
    const ScoreRule<Real>& rule = block.rules[0];
    const index_t begin = rule.visible_keys(block.query(r + W)).begin / kStep * kStep;
    const index_t end = round_up(rule.visible_keys(block.query(r + W - 1)).end, kStep);
    Range both = keys;
    if (begin - keys.begin >= kLeast) both.begin = min_of(begin, keys.end);
    if (keys.end - end >= kLeast) both.end = max_of(end, both.begin);
    return both;
  }

  // S^T of a tile, -inf where a key is not seen, and its maxima.
  void dot_products(const Block& block, const Tile& tile, Real* x, V (&top)[N], StripAsks& asks,
                    const Scratch& s) const {
    const index_t r = tile.group->r, last = min_of(r + kQueries, block.rows) - 1;
    const ScoreRule<Real>& rule = block.rules[0];
    const auto in_tile = [&](index_t key) { return min_of(max_of(key, tile.keys.begin), tile.keys.end); };
    // What all rows see.
    const index_t begin = round_up(in_tile(rule.visible_keys(block.query(last)).begin), index_t(kRows));
    const index_t end = max_of(in_tile(rule.visible_keys(block.query(r)).end) / kRows * kRows, begin);
    for (V& of_lanes : top) of_lanes = V(-kInfinity);
    const auto scores_of = [&](index_t key) { return x + (key - tile.keys.begin) * kQueries; };
    const auto edge = [&](const Elem* k, index_t width, Range keys) {
      at_edge(block, r, k, width, keys, scores_of(keys.begin), top, asks, s);
    };
    each_piece(block, {tile.keys.begin, begin}, edge);
    each_piece(block, {begin, end}, [&](const Elem* k, index_t width, Range keys) {
      multiply_keys<N>(k, width, keys, s.lanes.queries, scores_of(keys.begin), top, asks, NoEdges());
    });
    each_piece(block, {end, tile.keys.end}, edge);
  }
  // Keys that lie in one panel.
  template <class Work>
  FA_INLINE void each_piece(const Block& block, Range keys, const Work& work) const {
    const Panels<Target> k = plan_.packed.k(block.packed, plan_.packed.held(block.sequence.k_len));
    plan_.each_run(block, 0, keys, [&](Range run, index_t at) {
      for (index_t key = run.begin, end; key < run.end; key = end) {
        const index_t panel = k.at(at + key), begin = k.begin(panel), width = k.width(panel);
        end = min_of(begin + width - at, run.end);
        work(k.panel(panel) + (at + key - begin) * kStep, width, Range{key, end});
      }
    });
  }
  // Where whole vectors of lanes see none of the keys, these are left out.
  void at_edge(const Block& block, index_t r, const Elem* k, index_t width, Range keys, Real* x, V (&top)[N],
               StripAsks& asks, const Scratch& s) const {
    constexpr index_t kWide = kRows * N;  // Keys of a micro-kernel of one vector.
    const ScoreRule<Real>& rule = block.rules[0];
    for (index_t key = keys.begin, count; key < keys.end; key += count, k += count * kStep, x += count * kQueries) {
      const index_t diagonal = key - rule.diagonal(block.query(r));
      Edges edges{rule.window_right < 0 ? -kQueries : diagonal - rule.window_right,
                  rule.window_left < 0 ? kQueries : diagonal + rule.window_left + 1, rule.Sk - key};
      const index_t vector = edges.begin >= W ? 1 : 0;
      count = key + kWide <= keys.end && (vector == 1 || edges.end + kWide - 1 <= W) ? kWide : kRows;
      const Range these{key, key + count};
      if (count == kRows) {
        multiply_keys<N>(k, width, these, s.lanes.queries, x, top, asks, edges);
        continue;
      }
      edges.begin -= vector * W, edges.end -= vector * W;
      multiply_keys<1>(k, width, these, s.lanes.queries + vector * W * kStep, x + vector * W, top + vector, asks,
                       edges);
      for (index_t n = 0; n < count; ++n) Simd::store(x + n * kQueries + (1 - vector) * W, V(-kInfinity));
    }
  }

  template <int Vectors, class EdgesOrNone>
  FA_NOINLINE void multiply_keys(const Elem* k, index_t width, Range keys, const Elem* queries, Real* x, V* tops,
                                 StripAsks& asks, const EdgesOrNone& edges) const {
    using Micro = MicroKernel<Vectors>;
    constexpr int kRows = Micro::kRows;
    const index_t steps = plan_.packed.depth() / kStep;
    V top[Vectors];
    for (int n = 0; n < Vectors; ++n) top[n] = tops[n];
    for (index_t key = keys.begin; key < keys.end; key += kRows, k += kRows * kStep, x += kRows * kQueries) {
      asks.ask();
      V sum[kRows][Vectors];
      for (auto& row : sum)
        for (V& vector : row) vector = V(Real(0));
      const Elem *a = k, *b = queries;
      for (index_t i = 0; i < steps; ++i, a += width * kStep, b += kQueries * kStep)
        multiply_step<Micro, Vectors>(a, kStep, b, sum);
      for (int t = 0; t < kRows; ++t)
        for (int n = 0; n < Vectors; ++n) {
          const V score = edges.hide(sum[t][n], t, n);
          top[n] = vmax(top[n], score);  // Before it is stored: see from_products.
          Simd::store(x + t * kQueries + n * W, Simd::from_products(score));
        }
    }
    for (int n = 0; n < Vectors; ++n) tops[n] = top[n];
  }

  // Takes the maxima of a tile into the states of its group: all of its softmax but exp2 and its sum.
  Weights begin_softmax(const Block& block, Tile& tile, const Real* x, const V (&top)[N]) const {
    const V factor(block.rules[0].factor());
    Weights weights{x, tile.weights, (tile.keys.end - tile.keys.begin) / kStep, factor, {}, {}};
    for (int n = 0; n < N; ++n) {
      V& m = tile.group->m[n];
      const V raised = vmax(m, top[n] * factor);
      // 0 while nothing has been seen, as in SoftmaxState.
      const V shift = select_less(V(-kInfinity), raised, raised, V(Real(0)));
      tile.rescale[n] = softmax_weight(m - shift);
      m = raised;
      weights.shift[n] = V(Real(0)) - shift;
      weights.sum[n] = V(Real(0));
    }
    return weights;
  }

  // The products of V with a tile, beside exp2 of the tile after it.
  void finish(const Block& block, const Tile& tile, Weights& next, const Scratch& s) const {
    const Panels<Target> v = plan_.packed.v(block.packed, plan_.packed.held(block.sequence.k_len));
    for (index_t panel = 0; panel < v.count(); ++panel) {
      const auto values = [&](Range keys) {
        const index_t width = v.width(panel);
        Values these{width, tile.weights + (keys.begin - tile.keys.begin) * kQueries, {}};
        int nth = 0;
        plan_.each_run(block, 0, keys, [&](Range run, index_t at) {
          these.runs[nth++] = {v.panel(panel) + (at + run.begin) * width, (run.end - run.begin) / kStep};
        });
        return these;
      };
      Real* const o = s.lanes.o + v.begin(panel) * kQueries;
      multiply_values(values(tile.both), tile, o, next);
      const Range before{tile.keys.begin, tile.both.begin}, after{tile.both.end, tile.keys.end};
      if (!before.empty()) add_values(values(before), 0, o);
      if (!after.empty()) add_values(values(after), 1, o);
    }
    if (tile.last) put_rows(*tile.group, s);
  }

  // A panel of V, as far as it is of a tile: packed keys may turn once.
  struct Values {
    index_t width;
    const Elem* weights;
    struct {
      const Elem* v;
      index_t steps;
    } runs[2];
  };
  FA_NOINLINE void multiply_values(const Values& values, const Tile& tile, Real* o, Weights& next) const {
    Weights beside = next;
    const index_t width = values.width;
    const bool few = plan_.o_stride <= 2 * W;  // Products of few features are the shorter time to weigh a tile in.
    for (index_t c = 0; c < width; c += kRows, o += kRows * kQueries) {
      V sum[kRows][N];
      for (auto& row : sum)
        for (V& vector : row) vector = V(Real(0));
      const Elem *a, *b = values.weights;
      const auto step = [&](const auto& work) {
        multiply_step<MicroKernel<N>, N>(a, kStep, b, sum, [&](auto row) {
          if constexpr (row == kRows / 2 - 1) work();
        });
        a += width * kStep, b += kQueries * kStep;
      };
      const auto part_of_turn = [&](auto n, auto pace) {
        step([&] {
          if constexpr (n == 0) beside.template weigh<0>();
          if constexpr (n == pace) beside.template weigh<1>();
          if constexpr (n == pace + 1) beside.go_on();
        });
      };
      for (const auto& run : values.runs) {
        a = run.v + c * kStep;
        index_t i = 0;
        // A vector of weights every so many steps.
        const auto weigh = [&](auto pace) {
          for (; beside.left > 0 && i + 2 * pace <= run.steps; i += 2 * pace)
            each_part([&](auto n) { part_of_turn(n, pace); }, std::make_integer_sequence<int, 2 * pace>());
        };
        few ? weigh(std::integral_constant<int, 2>()) : weigh(std::integral_constant<int, 4>());
        for (; i < run.steps; ++i) step([] {});
      }
      for (int t = 0; t < kRows; ++t)
        for (int n = 0; n < N; ++n) {
          Real* const to = o + t * kQueries + n * W;
          Simd::store(to,
                      tile.first ? Simd::from_products(sum[t][n]) : fma(Simd::load(to), tile.rescale[n], sum[t][n]));
        }
    }
    next = beside;
  }

  // Adds the products with one vector of queries to o, which holds those with both.
  FA_NOINLINE void add_values(const Values& values, index_t vector, Real* o) const {
    using Micro = MicroKernel<1>;
    o += vector * W;
    for (index_t c = 0; c < values.width; c += Micro::kRows, o += Micro::kRows * kQueries) {
      V sum[Micro::kRows][1];
      for (auto& row : sum) row[0] = V(Real(0));
      const Elem* b = values.weights + vector * W * kStep;
      for (const auto& run : values.runs) {
        const Elem* a = run.v + c * kStep;
        for (index_t i = 0; i < run.steps; ++i, a += values.width * kStep, b += kQueries * kStep)
          multiply_step<Micro, 1>(a, kStep, b, sum);
      }
      for (int t = 0; t < Micro::kRows; ++t) Simd::store(o + t * kQueries, Simd::load(o + t * kQueries) + sum[t][0]);
    }
  }

  // O and the states of a group, row by row.
  void put_rows(const Group& group, const Scratch& s) const {
    for (int n = 0; n < N; ++n)
      for (index_t d = 0; d < plan_.o_stride; d += W)
        Simd::transpose(s.lanes.o + d * kQueries + n * W, kQueries, s.o + (group.r + n * W) * plan_.o_stride + d,
                        plan_.o_stride);
    for (int n = 0; n < N; ++n) {
      Real m[W], l[W];
      Simd::store(m, group.m[n]), Simd::store(l, group.l[n]);
      for (index_t i = 0; i < W; ++i) s.state[group.r + n * W + i] = {m[i], l[i]};
    }
  }

  const ForwardPlan<Target>& plan_;
};

}  // namespace flash_attn::cpu
