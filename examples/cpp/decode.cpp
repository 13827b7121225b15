// Generation over a paged key/value cache through the C++ interface: every step appends one key, rows of pages in any
// order.
//
//   c++ -std=c++20 decode.cpp $(pkg-config --cflags --libs flash_attn) && ./a.out
#include <flash_attn/attention.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 8, kPages = 6, kSteps = 40;

flash_attn::TensorView view(void* data, flash_attn::DType dtype, std::vector<std::int64_t> sizes) {
  flash_attn::TensorView t;
  t.data = data, t.dtype = dtype, t.ndim = int(sizes.size());
  std::int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) t.sizes[d] = sizes[d], t.strides[d] = stride, stride *= sizes[d];
  return t;
}

float value(std::int64_t step, std::int64_t n) { return float(std::sin(double(step * 97 + n) * 0.37)); }

}  // namespace

int main() {
  using flash_attn::DType;
  std::vector<float> k(kPages * kPage * kKvHeads * kDim), v(k.size());
  std::vector<std::int32_t> pages{5, 0, 3, 1, 4, 2}, length{0};
  std::vector<float> q(kHeads * kDim), k_new(kKvHeads * kDim), v_new(k_new.size()), out(q.size()), lse(kHeads);

  flash_attn::CacheArgs args;
  auto& problem = args.problem;
  problem.q = view(q.data(), DType::f32, {1, 1, kHeads, kDim});
  problem.k = view(k.data(), DType::f32, {kPages, kPage, kKvHeads, kDim});
  problem.v = view(v.data(), DType::f32, {kPages, kPage, kKvHeads, kDim});
  problem.block_table = view(pages.data(), DType::i32, {1, kPages});
  problem.seqused_k = view(length.data(), DType::i32, {1});
  problem.softmax_scale = 1 / std::sqrt(double(kDim));
  args.k_new = view(k_new.data(), DType::f32, {1, 1, kKvHeads, kDim});
  args.v_new = view(v_new.data(), DType::f32, {1, 1, kKvHeads, kDim});
  args.out = view(out.data(), DType::f32, {1, 1, kHeads, kDim});
  args.lse = view(lse.data(), DType::f32, {1, kHeads, 1});

  const flash_attn::Executor executor = flash_attn::default_executor();
  double worst = 0;
  for (; length[0] < kSteps; ++length[0]) {
    const std::int64_t step = length[0];
    for (std::size_t n = 0; n < q.size(); ++n) q[n] = value(step, std::int64_t(n) + 1000);
    for (std::size_t n = 0; n < k_new.size(); ++n)
      k_new[n] = value(step, std::int64_t(n)), v_new[n] = value(step, -std::int64_t(n));
    flash_attn::attention_with_cache(args, executor);
    // Head 3 reads key head 1; feature 5 of it by the definition.
    double sum = 0, expected = 0;
    for (std::int64_t j = 0; j <= step; ++j) {
      double score = 0;
      for (std::int64_t d = 0; d < kDim; ++d)
        score += double(q[3 * kDim + d]) * value(j, kDim + d) * problem.softmax_scale;
      sum += std::exp(score), expected += std::exp(score) * value(j, -(kDim + 5));
    }
    worst = std::fmax(worst, std::abs(out[3 * kDim + 5] - expected / sum));
  }
  std::printf("flash_attn %s: %d steps over pages of %d slots, largest error %.2g\n", flash_attn::kVersion, int(kSteps),
              int(kPage), worst);
  return worst < 1e-5 ? 0 : 1;
}
