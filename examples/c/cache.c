/* Generation token by token over a cache that grows, with rotary position embedding, through the C interface; compared
 * with causal attention over all tokens at once, rotated by flash_attn_rotary.
 *
 *   cc -std=c11 cache.c $(pkg-config --cflags --libs flash_attn) -lm && ./a.out */
#include <flash_attn/flash_attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 2, S = 29, H = 4, HK = 2, D = 16, SLOTS = 32 };

static flash_attn_tensor rows(float* data, int length, int heads) {
  flash_attn_tensor t = {
      data, FLASH_ATTN_F32, 4, {B, length, heads, D}, {(int64_t)length * heads * D, (int64_t)heads * D, D, 1}};
  return t;
}
/* Row `i` of every sequence. */
static flash_attn_tensor one_row(float* data, int i, int heads) {
  flash_attn_tensor t = rows(data, S, heads);
  t.data = data + (int64_t)i * heads * D;
  t.sizes[1] = 1;
  return t;
}
static flash_attn_tensor per_row(float* data, int length) {
  flash_attn_tensor t = {data, FLASH_ATTN_F32, 3, {B, H, length, 0}, {(int64_t)H * length, length, 1, 0}};
  return t;
}
static flash_attn_tensor table(float* data) {
  flash_attn_tensor t = {data, FLASH_ATTN_F32, 2, {SLOTS, D / 2, 0, 0}, {D / 2, 1, 0, 0}};
  return t;
}

static void must(flash_attn_status status, const char* what) {
  if (status == FLASH_ATTN_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", what, (int)status, flash_attn_last_error());
  exit(1);
}

static void rotate(float* x, int heads, flash_attn_tensor cos_table, flash_attn_tensor sin_table) {
  flash_attn_rotary_args args;
  flash_attn_rotary_args_init(&args);
  args.x = args.out = rows(x, S, heads);
  args.cos = cos_table, args.sin = sin_table, args.interleaved = 1;
  must(flash_attn_rotary(&args, NULL), "rotary");
}

int main(void) {
  static float q[B * S * H * D], k[B * S * HK * D], v[B * S * HK * D], steps[B * S * H * D], whole[B * S * H * D];
  static float k_cache[B * SLOTS * HK * D], v_cache[B * SLOTS * HK * D], lse[B * H * S];
  static float cosines[SLOTS * D / 2], sines[SLOTS * D / 2];
  for (int n = 0; n < B * S * H * D; ++n) q[n] = (float)sin(n * 0.7);
  for (int n = 0; n < B * S * HK * D; ++n) k[n] = (float)cos(n * 1.3), v[n] = (float)sin(n * 0.3 + 1);
  for (int n = 0; n < SLOTS * D / 2; ++n) {
    const double angle = n / (D / 2) * pow(10000, -2.0 * (n % (D / 2)) / D);
    cosines[n] = (float)cos(angle), sines[n] = (float)sin(angle);
  }

  for (int i = 0; i < S; ++i) {
    int32_t lengths[B];
    for (int b = 0; b < B; ++b) lengths[b] = i;
    flash_attn_problem problem;
    flash_attn_problem_init(&problem);
    problem.q = one_row(q, i, H);
    problem.k = rows(k_cache, SLOTS, HK), problem.v = rows(v_cache, SLOTS, HK);
    problem.seqused_k = (flash_attn_tensor){lengths, FLASH_ATTN_I32, 1, {B, 0, 0, 0}, {1, 0, 0, 0}};
    problem.softmax_scale = 1 / sqrt(D), problem.causal = 1;
    flash_attn_cache_args args;
    flash_attn_cache_args_init(&args);
    args.problem = &problem, args.k_new = one_row(k, i, HK), args.v_new = one_row(v, i, HK);
    args.rotary_cos = table(cosines), args.rotary_sin = table(sines);
    args.out = one_row(steps, i, H), args.lse = per_row(lse, 1);
    must(flash_attn_with_cache(&args, NULL), "with_cache");
  }

  rotate(q, H, table(cosines), table(sines));
  rotate(k, HK, table(cosines), table(sines));
  flash_attn_problem problem;
  flash_attn_problem_init(&problem);
  problem.q = rows(q, S, H), problem.k = rows(k, S, HK), problem.v = rows(v, S, HK);
  problem.softmax_scale = 1 / sqrt(D), problem.causal = 1;
  flash_attn_forward_args forward;
  flash_attn_forward_args_init(&forward);
  forward.problem = &problem, forward.out = rows(whole, S, H), forward.lse = per_row(lse, S);
  must(flash_attn_forward(&forward, NULL), "forward");

  double worst = 0;
  for (int n = 0; n < B * S * H * D; ++n) worst = fmax(worst, fabs(steps[n] - whole[n]));
  printf("flash_attn %s: %d steps over a cache, largest difference from all at once %.2g\n", flash_attn_version(), S,
         worst);
  return worst < 1e-5 ? 0 : 1;
}
