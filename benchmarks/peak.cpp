// The arithmetic limit that the CPU kernels are held against: products that never leave the registers, on 1..N threads.
//     c++ -std=c++20 -O2 -march=native -pthread benchmarks/peak.cpp -o peak && ./peak [threads]
#include <immintrin.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace {

// A product takes 4 to 6 cycles and two start in each, so twelve chains keep both pipes full.
constexpr int kChains = 12;

#ifdef __AVX512F__
using Vector = __m512;
Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
Vector broadcast(float value) { return _mm512_set1_ps(value); }
#else
using Vector = __m256;
Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
Vector broadcast(float value) { return _mm256_set1_ps(value); }
#endif

#ifdef __AVX512BF16__
Vector dot_bf16(Vector sum, Vector a, Vector b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

template <Vector Product(Vector, Vector, Vector), std::size_t... Chain>
void products(long steps, float& result, std::index_sequence<Chain...>) {
  Vector sums[] = {broadcast(1e-3f * Chain)...};
  const Vector a = broadcast(1e-3f), b = broadcast(1e-3f);
  for (long step = 0; step < steps; ++step) ((sums[Chain] = Product(sums[Chain], a, b)), ...);
  Vector total = a;
  ((total = multiply_add(total, sums[Chain], a)), ...);
  std::memcpy(&result, &total, sizeof result);
}

template <Vector Product(Vector, Vector, Vector)>
double gflops(int thread_count, int flops_per_lane) {
  constexpr long kSteps = 50'000'000;
  std::vector<float> results(static_cast<std::size_t>(thread_count));
  std::vector<std::thread> threads;
  const auto begin = std::chrono::steady_clock::now();
  for (float& result : results)
    threads.emplace_back([&result] { products<Product>(kSteps, result, std::make_index_sequence<kChains>()); });
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const double lanes = sizeof(Vector) / sizeof(float);
  return thread_count * static_cast<double>(kSteps) * kChains * lanes * flops_per_lane / elapsed.count() / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  for (int threads = 1; threads <= most; ++threads) {
    std::printf("%2d threads: fp32 %7.1f GFLOP/s", threads, gflops<multiply_add>(threads, 2));
#ifdef __AVX512BF16__
    std::printf(", bf16 %7.1f GFLOP/s", gflops<dot_bf16>(threads, 4));
#endif
    std::printf("\n");
  }
}
