// What the checks of forward and backward share: a case's inputs, device buffers, kernel arguments and reference.
#pragma once

#include "kernel_case.h"

namespace flash_attn::testing {

// Largest error over the largest value, with room for rounding P and the result.
inline double kernel_tolerance(DType dtype) { return dtype == DType::f32 ? 4e-6 : dtype == DType::f16 ? 2e-3 : 1.2e-2; }

// The larger of two errors; NaN wins.
inline double worse(double a, double b) { return b <= a ? a : b; }

class KernelRun {
 public:
  KernelRun(KernelDevice& device, const KernelCase& c, DType dtype) : device_(device), c_(c), dtype_(dtype) {
    const Shape& s = c.shape;
    cu_q_ = offsets(c.q_lengths), cu_k_ = offsets(c.k_lengths);
    Tq_ = c.varlen() ? cu_q_.back() + c.extra_rows : s.B * s.Sq;
    Tk_ = c.varlen() ? cu_k_.back() + c.extra_rows : s.B * s.Sk;
    std::mt19937 generator(11);
    q_ = Tensor::random({Tq_, s.H, s.D}, dtype, generator);
    k_ = Tensor::random({Tk_, s.Hk, s.D}, dtype, generator);
    v_ = Tensor::random({Tk_, s.Hk, s.Dv}, dtype, generator);
    dout_ = Tensor::random({Tq_, s.H, s.Dv}, dtype, generator);
    out_ = Tensor({Tq_, s.H, s.Dv}, dtype);
    lse_ = Tensor({Tq_ * s.H}, DType::f32);
    for (std::int64_t h = 0; h < s.H; ++h) slopes_.push_back(std::exp2(-float(h % 8 + 1)));
  }

 protected:
  // Inputs on the device.
  struct Inputs {
    explicit Inputs(KernelRun& r)
        : shift(r.c_.misaligned ? std::size_t(size_of(r.dtype_)) : 0),
          q(r.device_, r.q_.bytes().size() - 1, shift),
          k(r.device_, r.k_.bytes().size() - 1, shift),
          v(r.device_, r.v_.bytes().size() - 1, shift),
          slopes(r.device_, r.slopes_.size() * 4),
          rng(r.device_, 16),
          cu_q(r.device_, r.cu_q_.size() * 4),
          cu_k(r.device_, r.cu_k_.size() * 4) {
      q.fill(r.q_.bytes().data()), k.fill(r.k_.bytes().data()), v.fill(r.v_.bytes().data());
      slopes.fill(r.slopes_.data()), rng.fill(kRng), cu_q.fill(r.cu_q_.data()), cu_k.fill(r.cu_k_.data());
    }
    std::size_t shift;
    GuardedBuffer q, k, v, slopes, rng, cu_q, cu_k;
  };

  gpu::AttentionArgs arguments(const Inputs& inputs) const {
    gpu::AttentionArgs a = plain_arguments(c_, Tq_, Tk_);
    a.q.data = inputs.q.data(), a.k.data = inputs.k.data(), a.v.data = inputs.v.data();
    if (c_.varlen()) {
      a.cu_seqlens_q = reinterpret_cast<const std::int32_t*>(inputs.cu_q.data());
      a.cu_seqlens_k = reinterpret_cast<const std::int32_t*>(inputs.cu_k.data());
    }
    if (c_.features.alibi) a.alibi_slopes = reinterpret_cast<const float*>(inputs.slopes.data());
    if (c_.features.dropout_p > 0) {
      const DropoutRule rule = make_dropout(c_.features.dropout_p, kRng[0], kRng[1]);
      a.rng_state = reinterpret_cast<const std::int64_t*>(inputs.rng.data());
      a.keep_threshold = rule.keep_threshold;
      a.keep_scale = float(rule.keep_scale);
    }
    const std::int64_t unit = 16 / size_of(dtype_);
    a.regular = !c_.misaligned && c_.shape.D % unit == 0 && c_.shape.Dv % unit == 0;
    return a;
  }
  gpu::TensorArg tensor(const GuardedBuffer& buffer, std::int64_t rows, std::int64_t heads, std::int64_t width) const {
    return {buffer.data(), c_.varlen() ? 0 : rows * heads * width, heads * width, width};
  }

  // f(reference, first batch element of it that counts, how many do, first packed query and key row, Sq, Sk), for the
  // whole batch or sequence by sequence.
  template <class F>
  void for_each_reference(F f) {
    const Shape& s = c_.shape;
    if (references_.empty()) {
      if (!c_.varlen()) references_.push_back(problem(s).run(q_, k_, v_, dout_));
      for (std::int64_t b = 0; c_.varlen() && b < s.B; ++b) references_.push_back(sequence_reference(b));
    }
    if (!c_.varlen()) return f(references_[0], 0, s.B, 0, 0, s.Sq, s.Sk);
    for (std::int64_t b = 0; b < s.B; ++b)
      f(references_[b], b, 1, cu_q_[b], cu_k_[b], c_.q_lengths[b], c_.k_lengths[b]);
  }

  // `count` values of got from `at` on against those of expected from `skip` on, in units of the tolerance, which is
  // relative to the largest value or to `floor`.
  double difference(const Tensor& got, std::int64_t at, const std::vector<double>& expected, std::int64_t skip,
                    std::int64_t count, double floor = 1e-3) const {
    double worst = 0, largest = floor;
    for (std::int64_t i = 0; i < count; ++i) {
      worst = worse(worst, std::abs(got.get(at + i) - expected[skip + i]));
      largest = max_of(largest, std::abs(expected[skip + i]));
    }
    return worst / largest / kernel_tolerance(dtype_);
  }

  static constexpr std::int64_t kRng[2] = {1234567890123, 42};
  KernelDevice& device_;
  const KernelCase& c_;
  DType dtype_;
  std::vector<std::int32_t> cu_q_, cu_k_;
  std::int64_t Tq_ = 0, Tk_ = 0;
  Tensor q_, k_, v_, dout_, out_, lse_;
  std::vector<float> slopes_;

 private:
  std::vector<Reference> references_;

  static std::vector<std::int32_t> offsets(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> sum{0};
    for (std::int32_t n : lengths) sum.push_back(sum.back() + n);
    return sum;
  }

  Problem64 problem(const Shape& shape) const {
    Problem64 p{shape,
                c_.features,
                c_.scale != 0 ? c_.scale : 1.0 / std::sqrt(double(shape.D)),
                c_.features.alibi ? &slopes_ : nullptr,
                {}};
    p.dropout = make_dropout(c_.features.dropout_p, kRng[0], kRng[1]);
    return p;
  }

  // Sequence b as the last element of a dense batch, so that dropout sees its number.
  Reference sequence_reference(std::int64_t b) const {
    Shape s = c_.shape;
    s.B = b + 1, s.Sq = c_.q_lengths[b], s.Sk = c_.k_lengths[b];
    const auto slice = [&](const Tensor& packed, std::int64_t begin, std::int64_t rows, std::int64_t width) {
      Tensor t({b + 1, rows, width}, dtype_);
      for (std::int64_t i = 0; i < t.size(); ++i) t.set(i, 0);
      for (std::int64_t i = 0; i < rows * width; ++i) t.set(b * rows * width + i, packed.get(begin * width + i));
      return t;
    };
    return problem(s).run(slice(q_, cu_q_[b], s.Sq, s.H * s.D), slice(k_, cu_k_[b], s.Sk, s.Hk * s.D),
                          slice(v_, cu_k_[b], s.Sk, s.Hk * s.Dv), slice(dout_, cu_q_[b], s.Sq, s.H * s.Dv));
  }
};

}  // namespace flash_attn::testing
