// Attention in double precision, written plainly from its definition: softmax(scale * Q K^T + ...) V, one row at a
// time. Gradients by the chain rule over the whole matrices. The oracle of every C++ test of a backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/dropout.h"
#include "core/numeric.h"
#include "flash_attn/attention.h"

namespace flash_attn::testing {

struct Shape {
  std::int64_t B = 1, H = 2, Hk = 2, Sq = 64, Sk = 64, D = 32, Dv = 32;
};

struct Features {
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  bool alibi = false;
  double dropout_p = 0.0;
};

// One tensor of a problem: values as the backend sees them (rounded to dtype) in double, and the storage.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::vector<std::int64_t> shape, DType dtype) : dtype_(dtype), shape_(std::move(shape)) {
    std::int64_t n = 1;
    for (std::int64_t s : shape_) n *= s;
    bytes_.assign(static_cast<std::size_t>(n * size_of(dtype)) + 1,
                  char(0x5a));  // Poison: outputs must be overwritten.
    n_ = n;
  }
  static Tensor random(std::vector<std::int64_t> shape, DType dtype, std::mt19937& generator, double scale = 1.0) {
    Tensor t(std::move(shape), dtype);
    std::normal_distribution<double> normal(0.0, scale);
    for (std::int64_t i = 0; i < t.n_; ++i) t.set(i, normal(generator));
    return t;
  }
  std::int64_t size() const { return n_; }
  double get(std::int64_t i) const {
    const char* p = bytes_.data() + i * size_of(dtype_);
    switch (dtype_) {
      case DType::f16: return to_float(*reinterpret_cast<const Half*>(p));
      case DType::bf16: return to_float(*reinterpret_cast<const BFloat16*>(p));
      case DType::f32: return *reinterpret_cast<const float*>(p);
      default: return *reinterpret_cast<const double*>(p);
    }
  }
  std::vector<double> values() const {
    std::vector<double> all(static_cast<std::size_t>(n_));
    for (std::int64_t i = 0; i < n_; ++i) all[i] = get(i);
    return all;
  }
  void set(std::int64_t i, double value) {
    char* p = bytes_.data() + i * size_of(dtype_);
    switch (dtype_) {
      case DType::f16: *reinterpret_cast<Half*>(p) = from_float<Half>(float(value)); break;
      case DType::bf16: *reinterpret_cast<BFloat16*>(p) = from_float<BFloat16>(float(value)); break;
      case DType::f32: *reinterpret_cast<float*>(p) = float(value); break;
      default: *reinterpret_cast<double*>(p) = value;
    }
  }
  TensorView view() {
    TensorView v;
    v.data = bytes_.data();
    v.dtype = dtype_;
    v.ndim = static_cast<int>(shape_.size());
    std::int64_t stride = 1;
    for (int d = v.ndim - 1; d >= 0; --d) {
      v.sizes[d] = shape_[d];
      v.strides[d] = stride;
      stride *= shape_[d];
    }
    return v;
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::vector<char> bytes_;
  std::int64_t n_ = 0;
};

struct Reference {
  std::vector<double> out, lse, dq, dk, dv;
  std::vector<double> dmask;  // (B,H,Sq,Sk): exp(score - row maximum), negative where dropped
  std::vector<double> dbias;  // (B,H,Sq,Sk)
  std::vector<double> dsink;  // (H)
};

// Dense only; varlen tests compare sequence by sequence with the dense result.
struct Problem64 {
  Shape shape;
  Features features;
  double scale;
  const std::vector<float>* slopes = nullptr;  // (H)
  DropoutRule dropout;
  std::vector<double> bias = {};  // (B,H,Sq,Sk), -inf masks; none if empty
  std::vector<char> keep = {};    // (B,H,Sq,Sk): of masks and bounds; all if empty
  std::vector<double> sink = {};  // (H); none if empty

  std::int64_t pair(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return ((b * shape.H + h) * shape.Sq + i) * shape.Sk + j;
  }
  bool visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t n = pair(b, h, i, j);
    return visible(i, j) && (keep.empty() || keep[n]) && (bias.empty() || !std::isinf(bias[n]));
  }
  bool visible(std::int64_t i, std::int64_t j) const {
    const std::int64_t diagonal = i + shape.Sk - shape.Sq;
    if (features.causal && j > diagonal) return false;
    if (features.window_left >= 0 && features.window_left < shape.Sk && j < diagonal - features.window_left)
      return false;
    return features.causal || features.window_right < 0 || features.window_right >= shape.Sk ||
           j <= diagonal + features.window_right;
  }
  bool kept(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (!dropout.active) return true;
    const PhiloxWords words = dropout.bytes(b, h, i, j / 64, int(j / 4 % 4));
    return dropout.keep(words.w[j / 16 % 4] >> (8 * (j % 4)) & 255u);
  }
  double score(double dot, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    double s = scale * dot;
    if (features.softcap > 0) s = features.softcap * std::tanh(s / features.softcap);
    if (slopes) s -= (*slopes)[h] * std::abs(double(i + shape.Sk - shape.Sq - j));
    return bias.empty() ? s : s + bias[pair(b, h, i, j)];
  }
  Reference run(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout) const;

 private:
  struct Values {
    std::vector<double> q, k, v, dout;
  };
  void run_row(const Values& x, std::int64_t b, std::int64_t h, std::int64_t i, Reference& r) const;
};

// Of rows of n numbers.
inline double dot(const double* x, const double* y, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
inline void add_multiple(double* y, double factor, const double* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

inline void Problem64::run_row(const Values& x, std::int64_t b, std::int64_t h, std::int64_t i, Reference& r) const {
  const Shape& s = shape;
  const std::int64_t hk = h / (s.H / s.Hk), row = (b * s.Sq + i) * s.H + h;
  const auto key = [&](std::int64_t j) { return (b * s.Sk + j) * s.Hk + hk; };
  std::vector<std::int64_t> seen;
  for (std::int64_t j = 0; j < s.Sk; ++j)
    if (visible(b, h, i, j)) seen.push_back(j);
  std::vector<double> scores(s.Sk, 0.0), dots(s.Sk, 0.0), weights(s.Sk, 0.0), dp(s.Sk, 0.0);
  double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (const std::int64_t j : seen) {
    dots[j] = dot(x.q.data() + row * s.D, x.k.data() + key(j) * s.D, s.D);
    scores[j] = score(dots[j], b, h, i, j);
    top = std::max(top, scores[j]);
  }
  if (!sink.empty() && !std::isinf(sink[h])) {
    top = std::max(top, sink[h]);
    sum = std::exp(sink[h] - top);
  }
  for (const std::int64_t j : seen) sum += weights[j] = std::exp(scores[j] - top);
  r.lse[(b * s.H + h) * s.Sq + i] = sum > 0 ? top + std::log(sum) : std::numeric_limits<double>::infinity();
  if (sum == 0) return;
  const double* const dout = x.dout.data() + row * s.Dv;
  double delta = 0.0;
  for (const std::int64_t j : seen) {
    const bool keep = kept(b, h, i, j);
    const double p = weights[j] / sum, factor = keep ? dropout.keep_scale : 0.0;
    const double* const value = x.v.data() + key(j) * s.Dv;
    r.dmask[pair(b, h, i, j)] = keep ? weights[j] : -weights[j];
    add_multiple(r.out.data() + row * s.Dv, p * factor, value, s.Dv);
    add_multiple(r.dv.data() + key(j) * s.Dv, p * factor, dout, s.Dv);
    dp[j] = factor * dot(dout, value, s.Dv);
    delta += p * dp[j];
  }
  if (!sink.empty()) r.dsink[h] -= std::exp(sink[h] - top) / sum * delta;
  for (const std::int64_t j : seen) {
    r.dbias[pair(b, h, i, j)] = weights[j] / sum * (dp[j] - delta);
    double ds = r.dbias[pair(b, h, i, j)] * scale;
    if (features.softcap > 0) ds *= 1.0 - std::pow(std::tanh(scale * dots[j] / features.softcap), 2);
    add_multiple(r.dq.data() + row * s.D, ds, x.k.data() + key(j) * s.D, s.D);
    add_multiple(r.dk.data() + key(j) * s.D, ds, x.q.data() + row * s.D, s.D);
  }
}

inline Reference Problem64::run(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout) const {
  const Shape& s = shape;
  const Values x{q.values(), k.values(), v.values(), dout.values()};
  Reference r;
  r.out.assign(s.B * s.Sq * s.H * s.Dv, 0.0);
  r.lse.assign(s.B * s.H * s.Sq, 0.0);
  r.dmask.assign(s.B * s.H * s.Sq * s.Sk, 0.0);
  r.dbias = r.dmask;
  r.dsink.assign(s.H, 0.0);
  r.dq.assign(s.B * s.Sq * s.H * s.D, 0.0);
  r.dk.assign(s.B * s.Sk * s.Hk * s.D, 0.0);
  r.dv.assign(s.B * s.Sk * s.Hk * s.Dv, 0.0);
  for (std::int64_t b = 0; b < s.B; ++b)
    for (std::int64_t h = 0; h < s.H; ++h)
      for (std::int64_t i = 0; i < s.Sq; ++i) run_row(x, b, h, i, r);
  return r;
}

// For errors relative to the largest value, with room for rounding the result and, for bf16, P and dS.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64: return 1e-12;
    case DType::f32: return 4e-6;
    case DType::f16: return 2e-3;
    default: return 2e-2;
  }
}

inline double relative_error(const Tensor& got, const std::vector<double>& expected) {
  double error = 0.0, largest = 0.0;
  for (std::int64_t i = 0; i < got.size(); ++i) {
    if (std::isinf(expected[i]) && got.get(i) == expected[i]) continue;
    const double difference = std::abs(got.get(i) - expected[i]);
    error = difference >= error || std::isnan(difference) ? difference : error;
    if (std::isnan(error)) return error;
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0 ? error / largest : error;
}

}  // namespace flash_attn::testing
