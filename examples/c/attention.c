/* Causal attention and its gradients through the C interface, compared with the definition.
 *
 *   cc -std=c11 attention.c $(pkg-config --cflags --libs flash_attn) -lm && ./a.out */
#include <flash_attn/flash_attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { B = 1, S = 37, H = 2, D = 16, N = B * S * H * D };

static flash_attn_tensor rows(float* data) {
  flash_attn_tensor t = {data, FLASH_ATTN_F32, 4, {B, S, H, D}, {S * H * D, H * D, D, 1}};
  return t;
}
static flash_attn_tensor per_row(float* data) {
  flash_attn_tensor t = {data, FLASH_ATTN_F32, 3, {B, H, S, 0}, {H * S, S, 1, 0}};
  return t;
}

static void must(flash_attn_status status, const char* what) {
  if (status == FLASH_ATTN_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", what, (int)status, flash_attn_last_error());
  exit(1);
}

/* out of one row by the definition, in double precision. */
static double expected(const float* q, const float* k, const float* v, int i, int h, int feature) {
  double top = -INFINITY, sum = 0, out = 0;
  double score[S];
  for (int j = 0; j <= i; ++j) {
    score[j] = 0;
    for (int d = 0; d < D; ++d) score[j] += (double)q[(i * H + h) * D + d] * k[(j * H + h) * D + d] / sqrt(D);
    if (score[j] > top) top = score[j];
  }
  for (int j = 0; j <= i; ++j) {
    const double p = exp(score[j] - top);
    sum += p;
    out += p * v[(j * H + h) * D + feature];
  }
  return out / sum;
}

int main(void) {
  static float q[N], k[N], v[N], out[N], dout[N], dq[N], dk[N], dv[N], lse[B * H * S], softmax_d[B * H * S];
  for (int n = 0; n < N; ++n) {
    q[n] = (float)sin(n * 0.7), k[n] = (float)cos(n * 1.3), v[n] = (float)sin(n * 0.3 + 1), dout[n] = 1;
  }
  flash_attn_problem problem;
  flash_attn_problem_init(&problem);
  problem.q = rows(q), problem.k = rows(k), problem.v = rows(v);
  problem.softmax_scale = 1 / sqrt(D);
  problem.causal = 1;

  flash_attn_forward_args forward;
  flash_attn_forward_args_init(&forward);
  forward.problem = &problem, forward.out = rows(out), forward.lse = per_row(lse);
  must(flash_attn_forward(&forward, NULL), "forward");

  flash_attn_backward_args backward;
  flash_attn_backward_args_init(&backward);
  backward.problem = &problem;
  backward.dout = rows(dout), backward.out = rows(out), backward.lse = per_row(lse);
  backward.dq = rows(dq), backward.dk = rows(dk), backward.dv = rows(dv), backward.softmax_d = per_row(softmax_d);
  must(flash_attn_backward(&backward, NULL), "backward");

  double worst = 0, kept = 0;
  for (int i = 0; i < S; ++i)
    for (int h = 0; h < H; ++h)
      for (int d = 0; d < D; ++d) worst = fmax(worst, fabs(out[(i * H + h) * D + d] - expected(q, k, v, i, h, d)));
  for (int n = 0; n < N; ++n)
    kept += dv[n]; /* Rows of P sum to 1, so with dout = 1 the entries of dv sum to those of dout. */

  problem.k.sizes[3] = D / 2;
  const flash_attn_status refused = flash_attn_forward(&forward, NULL);
  printf("flash_attn %s: largest error %.2g, sum of dv %.3f of %d; a wrong shape: status %d, %s\n",
         flash_attn_version(), worst, kept, N, (int)refused, flash_attn_last_error());
  return worst < 1e-5 && fabs(kept - N) < 1e-2 && refused == FLASH_ATTN_INVALID ? 0 : 1;
}
