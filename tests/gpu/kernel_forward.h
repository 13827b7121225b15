// Runs a forward kernel on one case and compares with the double precision reference.
#pragma once

#include "kernel_run.h"

namespace flash_attn::testing {

class ForwardCheck : KernelRun {
 public:
  using KernelRun::KernelRun;

  // The largest of the errors of out, lse and, with dropout, S_dmask over the tolerance; above 1 is wrong.
  double run(gpu::Variant variant) {
    launch(variant, 1);
    double error = c_.features.dropout_p > 0 ? dmask_error() : 0;
    const Shape& s = c_.shape;
    for_each_reference([&](const Reference& r, std::int64_t b, std::int64_t count, std::int64_t row, std::int64_t,
                           std::int64_t Sq, std::int64_t) {
      const std::int64_t width = s.H * s.Dv;
      error = worse(error, difference(out_, row * width, r.out, b * Sq * width, count * Sq * width));
      error = worse(error, lse_difference(r, b, count, row, Sq));
    });
    if (!c_.varlen()) return error;
    for (std::int64_t t = cu_q_.back(); t < Tq_; ++t)
      for (std::int64_t h = 0; h < s.H; ++h) {
        for (std::int64_t d = 0; d < s.Dv; ++d)
          if (out_.get((t * s.H + h) * s.Dv + d) != 0) error = 1e9;
        if (lse_.get(h * Tq_ + t) != std::numeric_limits<double>::infinity()) error = 1e9;
      }
    return error;
  }

  float milliseconds(gpu::Variant variant, int repeats) {
    launch(variant, 3);
    return launch(variant, repeats);
  }

  const char* kernel(gpu::Variant variant) const { return row(variant).name; }

 private:
  const gpu::KernelRow& row(gpu::Variant variant) const {
    return find_kernel(gpu::Family::forward, device_.target(), dtype_, c_.shape.D, c_.shape.Dv, variant);
  }

  float launch(gpu::Variant variant, int repeats) {
    const gpu::KernelRow& kernel = row(variant);
    const Inputs inputs(*this);
    GuardedBuffer out(device_, out_.bytes().size() - 1, inputs.shift), lse(device_, lse_.bytes().size() - 1);
    out.fill(nullptr), lse.fill(nullptr);
    gpu::ForwardArgs args{};
    gpu::AttentionArgs& a = args.attention = arguments(inputs);
    a.tiles = int(max_of<index_t>(1, ceil_div(c_.shape.Sq, kernel.block_rows())));
    args.out = tensor(out, c_.shape.Sq, c_.shape.H, c_.shape.Dv);
    args.lse = reinterpret_cast<float*>(lse.data());
    const index_t rows = Tq_ * c_.shape.H, splits = c_.splits;
    GuardedBuffer parts(device_, std::size_t(splits * rows * c_.shape.Dv * 4)),
        lses(device_, std::size_t(splits * rows * 4));
    parts.fill(nullptr), lses.fill(nullptr);
    args.splits = {c_.splits, rows, reinterpret_cast<float*>(parts.data()), reinterpret_cast<float*>(lses.data())};
    const unsigned blocks = unsigned(a.tiles * c_.splits * a.H * (a.B + (c_.varlen() ? 1 : 0)));
    const float ms = device_.launch(kernel, blocks, &args, sizeof(args), repeats);
    if (splits > 1) combine(args);
    parts.fetch(nullptr), lses.fetch(nullptr);
    out.fetch(const_cast<char*>(out_.bytes().data()));
    lse.fetch(const_cast<char*>(lse_.bytes().data()));
    return ms;
  }

  void combine(const gpu::ForwardArgs& forward) {
    const gpu::KernelRow& kernel =
        find_kernel(gpu::Family::combine, device_.target(), dtype_, 1, 1, gpu::Variant::general);
    const gpu::AttentionArgs& a = forward.attention;
    const int waves = int(ceil_div(a.Dv, kernel.wave()));
    const gpu::CombineArgs args{forward.splits, forward.out, forward.lse, a.H, c_.varlen() ? a.Tq : a.Sq, a.Dv, waves};
    const index_t blocks = ceil_div(forward.splits.rows * waves, index_t(kernel.waves));
    device_.launch(kernel, unsigned(blocks), &args, sizeof(args), 1);
  }

  double dmask_error() {
    const Shape& s = c_.shape;
    const gpu::KernelRow& kernel =
        find_kernel(gpu::Family::forward_dmask, device_.target(), dtype_, s.D, s.Dv, gpu::Variant::general);
    Tensor dmask({s.B, s.H, s.Sq, s.Sk}, dtype_);
    const Inputs inputs(*this);
    GuardedBuffer buffer(device_, dmask.bytes().size() - 1);
    buffer.fill(nullptr);
    gpu::ForwardDmaskArgs args{arguments(inputs), buffer.data()};
    args.attention.tiles = int(max_of<index_t>(1, ceil_div(s.Sq, kernel.block_rows())));
    device_.launch(kernel, unsigned(args.attention.tiles * s.H * s.B), &args, sizeof(args), 1);
    buffer.fetch(const_cast<char*>(dmask.bytes().data()));
    double error = 0;
    for_each_reference([&](const Reference& r, std::int64_t b, std::int64_t count, std::int64_t, std::int64_t,
                           std::int64_t Sq, std::int64_t Sk) {
      for (std::int64_t unit = b * s.H; unit < (b + count) * s.H; ++unit)
        for (std::int64_t i = 0; i < s.Sq; ++i)
          for (std::int64_t j = 0; j < s.Sk; ++j) {
            const double expected = i < Sq && j < Sk ? r.dmask[(unit * Sq + i) * Sk + j] : 0.0;
            error =
                worse(error, std::abs(dmask.get((unit * s.Sq + i) * s.Sk + j) - expected) / kernel_tolerance(dtype_));
          }
    });
    return error;
  }

  double lse_difference(const Reference& r, std::int64_t b, std::int64_t count, std::int64_t first_row,
                        std::int64_t Sq) const {
    const std::int64_t H = c_.shape.H;
    double error = 0;
    for (std::int64_t e = 0; e < count; ++e)
      for (std::int64_t h = 0; h < H; ++h)
        for (std::int64_t i = 0; i < Sq; ++i) {
          const double expected = r.lse[((b + e) * H + h) * Sq + i];
          const double got = lse_.get(c_.varlen() ? h * Tq_ + first_row + i : (e * H + h) * Sq + i);
          if (got != expected) error = worse(error, std::abs(got - expected) / (1 + std::abs(expected)) / 2e-5);
        }
    return error;
  }
};

}  // namespace flash_attn::testing
