// Symmetric INT4 and INT8 of groups that need not begin at whole bytes: rows of an odd length, and channels whose rows
// do not begin at 16-byte boundaries. The tensor is read twice: for the scales, then for the codes.
//
// A tensor is seen as (runs, length, channels), where the last run may be shorter; a group is the numbers of one run
// and one channel.
#include "common.cuh"

constexpr int BLOCK = 256;

// `lanes` threads, 1 or 32, share a group.
template <int BITS, class T>
__device__ __forceinline__ void fit(
    const T* x, float* scales, long long numel, long long length, long long channels, long long groups, int lanes,
    bool paper) {
    const long long thread = (long long)blockIdx.x * BLOCK + threadIdx.x, group = thread / lanes;
    const long long run = group / channels, first = run * length * channels + (group - run * channels);
    Range<T> range;
    if (group < groups)
        for (long long k = threadIdx.x % lanes; k < length; k += lanes) {
            const long long element = first + k * channels;
            if (element < numel) range.include_one(x[element]);
        }
    for (int step = lanes / 2; step; step /= 2)
        range.merge(__shfl_xor_sync(ALL_LANES, range.high, step), __shfl_xor_sync(ALL_LANES, range.low, step));
    if (group < groups && threadIdx.x % lanes == 0)
        scales[group] = Symmetric<BITS>::fit(number<T>(range.high, 0), number<T>(range.low, 0), paper).scale;
}

__device__ __forceinline__ float scale_of(
    const float* scales, long long element, long long length, long long channels) {
    const long long row = element / channels;
    return scales[row / length * channels + (element - row * channels)];
}

// A thread has two elements, which may be in different groups.
template <int BITS, bool STOCHASTIC, class T>
__device__ __forceinline__ void encode_all(
    const T* x, const float* scales, unsigned char* codes, long long numel, long long length, long long channels,
    long long seed) {
    const long long first = ((long long)blockIdx.x * BLOCK + threadIdx.x) * 2;
    if (first >= numel) return;
    const bool both = first + 1 < numel;
    float pair[2] = {};
    Parameters each[2] = {};
    for (int k = 0; k <= both; ++k) {
        const float scale = scale_of(scales, first + k, length, channels);
        pair[k] = to_float(x[first + k]);
        each[k] = {scale, 0.0f, reciprocal(scale)};
    }
    store_pair<Symmetric<BITS>, STOCHASTIC>(codes, pair, each, first, both, first, seed);
}

template <int BITS, class T>
__device__ __forceinline__ void decode_all(
    const unsigned char* codes, const float* scales, T* x, long long numel, long long length, long long channels) {
    const long long first = ((long long)blockIdx.x * BLOCK + threadIdx.x) * 2;
    for (long long element = first; element < min(first + 2, numel); ++element) {
        const Parameters p = {scale_of(scales, element, length, channels), 0.0f, 0.0f};
        from_float(restore<Symmetric<BITS>>(codes, element, p), x[element]);
    }
}

#define KERNELS(WIDTH, BITS, SUFFIX, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) blocks##WIDTH##_fit##SUFFIX(                                   \
        const T* x, float* scales, long long numel, long long length, long long channels, long long groups,            \
        long long lanes, long long paper) {                                                                            \
        fit<BITS>(x, scales, numel, length, channels, groups, (int)lanes, paper);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) blocks##WIDTH##_encode##SUFFIX(                                \
        const T* x, const float* scales, unsigned char* codes, long long numel, long long length,                      \
        long long channels) {                                                                                          \
        encode_all<BITS, false>(x, scales, codes, numel, length, channels, 0);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) blocks##WIDTH##_encode_stochastic##SUFFIX(                     \
        const T* x, const float* scales, unsigned char* codes, long long seed, long long numel, long long length,      \
        long long channels) {                                                                                          \
        encode_all<BITS, true>(x, scales, codes, numel, length, channels, seed);                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) blocks##WIDTH##_decode##SUFFIX(                                \
        const unsigned char* codes, const float* scales, T* x, long long numel, long long length,                      \
        long long channels) {                                                                                          \
        decode_all<BITS>(codes, scales, x, numel, length, channels);                                                   \
    }

FOR_EACH_WIDTH(KERNELS)
