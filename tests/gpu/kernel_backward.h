// Runs the backward kernels on one case and compares with the double precision reference. Out and LSE come from the
// reference, so that nothing depends on the forward kernels.
#pragma once

#include "kernel_run.h"

namespace flash_attn::testing {

class BackwardCheck : KernelRun {
 public:
  BackwardCheck(KernelDevice& device, const KernelCase& c, DType dtype) : KernelRun(device, c, dtype) {
    const Shape& s = c.shape;
    dq_ = Tensor({Tq_, s.H, s.D}, dtype);
    dk_ = Tensor({Tk_, s.Hk, s.D}, dtype);
    dv_ = Tensor({Tk_, s.Hk, s.Dv}, dtype);
    delta_ = Tensor({Tq_ * s.H}, DType::f32);
  }

  // The largest of the errors of dq, dk and dv over three times forward's tolerance; above 1 is wrong. The kernels run
  // twice, and must give the same bits.
  double run(gpu::Variant variant) {
    set_forward_results();
    launch(variant, 1);
    const std::vector<char> bits[] = {dq_.bytes(), dk_.bytes(), dv_.bytes()};
    launch(variant, 1);
    double error = bits[0] == dq_.bytes() && bits[1] == dk_.bytes() && bits[2] == dv_.bytes() ? 0 : 1e9;
    const Shape& s = c_.shape;
    for_each_reference([&](const Reference& r, std::int64_t b, std::int64_t count, std::int64_t q_row,
                           std::int64_t k_row, std::int64_t Sq, std::int64_t Sk) {
      const auto compare = [&](const Tensor& got, const std::vector<double>& expected, std::int64_t row,
                               std::int64_t rows, std::int64_t width) {
        // dS = P (dP - delta) is a difference of terms of this size; with one key it is 0.
        const double floor = 1.0 / double(max_of<std::int64_t>(1, Sk));
        error = worse(error, difference(got, row * width, expected, b * rows * width, count * rows * width, floor) / 3);
      };
      compare(dq_, r.dq, q_row, Sq, s.H * s.D);
      compare(dk_, r.dk, k_row, Sk, s.Hk * s.D);
      compare(dv_, r.dv, k_row, Sk, s.Hk * s.Dv);
    });
    if (!c_.varlen()) return error;
    const auto expect_zeros = [&](const Tensor& t, std::int64_t first) {
      for (std::int64_t i = first; i < t.size(); ++i)
        if (t.get(i) != 0) error = 1e9;
    };
    expect_zeros(dq_, cu_q_.back() * s.H * s.D);
    expect_zeros(dk_, cu_k_.back() * s.Hk * s.D);
    expect_zeros(dv_, cu_k_.back() * s.Hk * s.Dv);
    for (std::int64_t h = 0; h < s.H; ++h)
      for (std::int64_t t = cu_q_.back(); t < Tq_; ++t)
        if (delta_.get(h * Tq_ + t) != 0) error = 1e9;
    return error;
  }

  float milliseconds(gpu::Variant variant, int repeats) {
    for (std::int64_t i = 0; i < out_.size(); ++i) out_.set(i, 0);
    for (std::int64_t i = 0; i < lse_.size(); ++i) lse_.set(i, std::log(double(c_.shape.Sk)) + 0.5);
    launch(variant, 3);
    return launch(variant, repeats);
  }

  std::string kernel(gpu::Variant variant) const {
    std::string names;
    for (const gpu::KernelRow* row : rows(variant)) names += std::string(names.empty() ? "" : " ") + row->name;
    return names;
  }

 private:
  std::vector<const gpu::KernelRow*> rows(gpu::Variant variant) const {
    const auto find = [&](gpu::Family family, gpu::Variant v) {
      return &find_kernel(family, device_.target(), dtype_, c_.shape.D, c_.shape.Dv, v);
    };
    std::vector<const gpu::KernelRow*> all{find(gpu::Family::backward_delta, gpu::Variant::general)};
    const gpu::KernelRow* const dq = find(gpu::Family::backward_dq, variant);
    try {
      all.push_back(find(gpu::Family::backward_dkdv, variant));
    } catch (const std::runtime_error&) {  // Wider heads have a kernel for each.
      all.push_back(find(gpu::Family::backward_dk, variant));
      all.push_back(find(gpu::Family::backward_dv, variant));
    }
    all.push_back(dq);
    return all;
  }

  // Out, rounded as forward would, and LSE of the reference; the two infinities for rows without keys.
  void set_forward_results() {
    const Shape& s = c_.shape;
    for_each_reference([&](const Reference& r, std::int64_t b, std::int64_t count, std::int64_t row, std::int64_t,
                           std::int64_t Sq, std::int64_t) {
      const std::int64_t width = s.H * s.Dv;
      for (std::int64_t i = 0; i < count * Sq * width; ++i) out_.set(row * width + i, r.out[b * Sq * width + i]);
      for (std::int64_t e = 0; e < count; ++e)
        for (std::int64_t h = 0; h < s.H; ++h)
          for (std::int64_t i = 0; i < Sq; ++i) {
            const double lse = r.lse[((b + e) * s.H + h) * Sq + i];
            lse_.set(c_.varlen() ? h * Tq_ + row + i : (e * s.H + h) * Sq + i, std::isinf(lse) && i % 2 ? -lse : lse);
          }
    });
  }

  float launch(gpu::Variant variant, int repeats) {
    const Inputs inputs(*this);
    const auto buffer = [&](const Tensor& t) { return GuardedBuffer(device_, t.bytes().size() - 1, inputs.shift); };
    GuardedBuffer dout = buffer(dout_), out = buffer(out_), dq = buffer(dq_), dk = buffer(dk_), dv = buffer(dv_);
    GuardedBuffer lse(device_, lse_.bytes().size() - 1), delta(device_, delta_.bytes().size() - 1);
    dout.fill(dout_.bytes().data()), out.fill(out_.bytes().data()), lse.fill(lse_.bytes().data());
    dq.fill(nullptr), dk.fill(nullptr), dv.fill(nullptr), delta.fill(nullptr);

    const Shape& s = c_.shape;
    gpu::BackwardArgs args{};
    gpu::AttentionArgs& a = args.attention = arguments(inputs);
    args.dout = tensor(dout, s.Sq, s.H, s.Dv), args.out = tensor(out, s.Sq, s.H, s.Dv);
    args.dq = tensor(dq, s.Sq, s.H, s.D), args.dk = tensor(dk, s.Sk, s.Hk, s.D), args.dv = tensor(dv, s.Sk, s.Hk, s.Dv);
    args.lse = reinterpret_cast<const float*>(lse.data());
    args.delta = reinterpret_cast<float*>(delta.data());
    float ms = 0;
    for (const gpu::KernelRow* kernel : rows(variant)) {
      const bool by_query = kernel->family == gpu::Family::backward_delta || kernel->family == gpu::Family::backward_dq;
      a.tiles = int(max_of<index_t>(1, ceil_div(by_query ? s.Sq : s.Sk, kernel->block_rows())));
      const unsigned blocks = unsigned(a.tiles * (by_query ? a.H : a.Hk) * (a.B + (c_.varlen() ? 1 : 0)));
      ms += device_.launch(*kernel, blocks, &args, sizeof(args), repeats);
    }
    dq.fetch(const_cast<char*>(dq_.bytes().data()));
    dk.fetch(const_cast<char*>(dk_.bytes().data()));
    dv.fetch(const_cast<char*>(dv_.bytes().data()));
    delta.fetch(const_cast<char*>(delta_.bytes().data()));
    return ms;
  }

  Tensor dq_, dk_, dv_, delta_;
};

}  // namespace flash_attn::testing
