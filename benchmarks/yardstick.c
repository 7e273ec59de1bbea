// The yardstick: hand-written AVX2 + FMA kernels for one step and for a short prefill, one thread. What ours is
// measured against, in one process (kernels.py builds this as a shared library and calls it by ctypes).
//
// State: float32 [H][d][d], key-major, d a multiple of 32. A lower bound, not a layer: it takes the decay factors
// ready-made (no exp), reuses one head's q, k, v for all heads, checks nothing, and has no feature map or normaliser.
#include <immintrin.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#define FOR4(c) _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) // unrolled, so that acc[4] lives in registers

enum { TOUCH, GATED, GATED_DELTA };
enum { MAX_D = 256, MAX_T = 64 };

typedef struct { const float *q, *k, *v, *g; float beta, kq; float *o; int d; } Token; // kq = k.q, once per head
typedef void (*Block)(float *, size_t, const Token *, int);

// S <- diag(g) S + k v^T, o = S^T q, for 32 columns: 4 vector accumulators stay in registers. ld = row stride of S.
static void gated_block(float *S, size_t ld, const Token *x, int j) {
    __m256 acc[4], v[4];
    const float *restrict xk = x->k, *restrict xq = x->q, *restrict xg = x->g;
    const int d = x->d;
    FOR4(c) { acc[c] = _mm256_setzero_ps(); v[c] = _mm256_loadu_ps(x->v + j + 8 * c); }
    for (int i = 0; i < d; i++) {
        float *row = S + i * ld;
        __m256 k = _mm256_broadcast_ss(xk + i), q = _mm256_broadcast_ss(xq + i), g = _mm256_broadcast_ss(xg + i);
        FOR4(c) {
            __m256 s = _mm256_fmadd_ps(g, _mm256_loadu_ps(row + 8 * c), _mm256_mul_ps(k, v[c]));
            _mm256_storeu_ps(row + 8 * c, s);
            acc[c] = _mm256_fmadd_ps(q, s, acc[c]);
        }
    }
    FOR4(c) _mm256_storeu_ps(x->o + j + 8 * c, acc[c]);
}

// Gated delta rule in two sweeps: read S^T k and S^T q together, then write. g[0] is the head's decay.
static void gated_delta_block(float *S, size_t ld, const Token *x, int j) {
    const float *restrict xk = x->k, *restrict xq = x->q;
    const int d = x->d;
    __m256 g = _mm256_set1_ps(x->g[0]), beta = _mm256_set1_ps(x->beta), kq = _mm256_set1_ps(x->kq), u[4], w[4];
    FOR4(c) u[c] = w[c] = _mm256_setzero_ps();
    for (int i = 0; i < d; i++) {
        __m256 k = _mm256_broadcast_ss(xk + i), q = _mm256_broadcast_ss(xq + i);
        FOR4(c) {
            __m256 s = _mm256_loadu_ps(S + i * ld + 8 * c);
            u[c] = _mm256_fmadd_ps(k, s, u[c]);
            w[c] = _mm256_fmadd_ps(q, s, w[c]);
        }
    }
    FOR4(c) {
        u[c] = _mm256_mul_ps(beta, _mm256_fnmadd_ps(g, u[c], _mm256_loadu_ps(x->v + j + 8 * c)));
        _mm256_storeu_ps(x->o + j + 8 * c, _mm256_fmadd_ps(g, w[c], _mm256_mul_ps(kq, u[c])));
    }
    for (int i = 0; i < d; i++) {
        __m256 k = _mm256_broadcast_ss(xk + i);
        FOR4(c) {
            float *s = S + i * ld + 8 * c;
            _mm256_storeu_ps(s, _mm256_fmadd_ps(g, _mm256_loadu_ps(s), _mm256_mul_ps(k, u[c])));
        }
    }
}

static void step(Block f, float *S, int H, int d, const Token *x) {
    for (int h = 0; h < H; h++)
        for (int j = 0; j < d; j += 32) f(S + (size_t)h * d * d + j, d, x, j);
}

// T tokens with the time loop inside one 32-column block, copied to a dense buffer that stays in L1.
static void prefill(Block f, float *S, int H, int d, const Token *x, int T) {
    float buf[MAX_D * 32] __attribute__((aligned(64)));
    for (int h = 0; h < H; h++)
        for (int j = 0; j < d; j += 32) {
            float *s = S + (size_t)h * d * d + j;
            for (int i = 0; i < d; i++) memcpy(buf + i * 32, s + (size_t)i * d, 128);
            for (int t = 0; t < T; t++) f(buf, 32, x + t, j);
            for (int i = 0; i < d; i++) memcpy(s + (size_t)i * d, buf + i * 32, 128);
        }
}

static void touch(float *S, size_t n) { // read and write the state once: no step can be faster
    __m256 a = _mm256_set1_ps(.999f);
    for (size_t i = 0; i < n; i += 8) _mm256_storeu_ps(S + i, _mm256_mul_ps(a, _mm256_loadu_ps(S + i)));
}

static double now_us(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

// `runs` times: T tokens (T = 1: a step, else a prefill) through each of `layers` states; us[r] gets run r's time.
// q, k, v, o are [T][d], factors [d]. The loop is here so that no time of the call from Python is counted.
// cpu_time: the thread's CPU time instead of the wall clock. Returns 0, or 1 for sizes it can't take.
int yardstick(int kernel, float **states, int layers, int H, int d, int T, const float *q, const float *k,
              const float *v, const float *factors, float beta, float *o, int cpu_time, int runs, double *us) {
    if (d < 32 || d % 32 || d > MAX_D || T < 1 || T > MAX_T) return 1;
    Token x[MAX_T];
    for (int t = 0; t < T; t++) {
        x[t] = (Token){q + t * d, k + t * d, v + t * d, factors, beta, 0, o + t * d, d};
        for (int i = 0; i < d; i++) x[t].kq += x[t].k[i] * x[t].q[i];
    }
    Block f = kernel == GATED ? gated_block : gated_delta_block;
    clockid_t clock = cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    for (int r = 0; r < runs; r++) {
        double start = now_us(clock);
        for (int l = 0; l < layers; l++) {
            if (kernel == TOUCH) touch(states[l], (size_t)H * d * d);
            else if (T == 1) step(f, states[l], H, d, x);
            else prefill(f, states[l], H, d, x, T);
        }
        us[r] = now_us(clock) - start;
    }
    return 0;
}
