// The sum of each channel's magnitudes, in the order of additions that the reference defines.
#include "common.cuh"

constexpr int BLOCK = 256;
constexpr int RUN = 64;    // rows that are added one by one
constexpr int HELD = 16;   // of them loaded at once

// A thread has a run of rows of one channel: float64 (runs, channels).
template <class T>
__device__ __forceinline__ void sum_runs(const T* x, double* sums, long long rows, long long channels) {
    const long long blocks_across = (channels + BLOCK - 1) / BLOCK;
    const long long run = blockIdx.x / blocks_across;
    const long long channel = (blockIdx.x - run * blocks_across) * BLOCK + threadIdx.x;
    if (channel >= channels) return;
    double sum = 0.0;
    for (int start = 0; start < RUN; start += HELD) {
        float held[HELD];
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const long long row = run * RUN + start + k;
            held[k] = row < rows ? fabsf(to_float(x[row * channels + channel])) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < HELD; ++k) sum = __dadd_rn(sum, (double)held[k]);
    }
    sums[run * channels + channel] = sum;
}

// A thread has a channel.
extern "C" __global__ void __launch_bounds__(BLOCK) sums_total(
    const double* sums, double* total, long long runs, long long channels) {
    const long long channel = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (channel >= channels) return;
    double sum = 0.0;
    for (long long run = 0; run < runs; ++run) sum = __dadd_rn(sum, sums[run * channels + channel]);
    total[channel] = sum;
}

#define KERNELS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK) sums_runs##SUFFIX(                                             \
        const T* x, double* sums, long long rows, long long channels) {                                                \
        sum_runs(x, sums, rows, channels);                                                                             \
    }

KERNELS(_f32, Float)
KERNELS(_f16, Half)
KERNELS(_bf16, Bfloat16)
