// Channel-wise symmetric INT4 and INT8 of a (rows, channels) tensor whose rows begin at 16-byte boundaries.
//
// A block has a run of rows and some neighbouring channels: its threads are `down` rows of 256 / down, and each has the
// channels of one unit. A tile is what a block holds in registers: HELD rows a thread. The tensor is read once if a run
// fits in a tile; of a longer one the tiles are read again, from the cache, after the extremes are known.
#include "common.cuh"

constexpr int BLOCK = 256;  // at most
constexpr int HELD = 4;

// Where this thread's block and its elements are.
template <class T>
struct Place {
    int across, down, x, y, tiles;
    long long run, first_row, rows;  // of the block
    long long unit, units, column;   // of the thread; units a row of the tensor

    __device__ __forceinline__ Place(long long all_rows, long long channels, long long size, long long threads_across) {
        const int shift = __ffs((int)threads_across) - 1;
        across = (int)threads_across;
        down = blockDim.x >> shift;
        x = threadIdx.x & (across - 1);
        y = threadIdx.x >> shift;
        units = channels / Unit<T>::SIZE;
        const long long blocks_across = (units + across - 1) >> shift;
        run = blockIdx.x / blocks_across;
        unit = ((blockIdx.x - run * blocks_across) << shift) + x;
        column = unit * Unit<T>::SIZE;
        first_row = run * size;
        rows = min(size, all_rows - first_row);
        tiles = (int)((size + HELD * down - 1) / (HELD * down));
    }

    // The row in the run of the k-th unit of a tile.
    __device__ __forceinline__ long long row(int tile, int k) const { return ((long long)tile * HELD + k) * down + y; }

    __device__ __forceinline__ bool has(long long row) const { return row < rows && unit < units; }
};

template <class T>
__device__ __forceinline__ void load(
    const T* x, long long channels, Unit<T> (&held)[HELD], const Place<T>& place, int tile) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const long long row = place.row(tile, k);
        const int count = place.has(row) ? Unit<T>::SIZE : 0;
        held[k] = load_unit(x + (place.first_row + row) * channels + place.column, count, true);
    }
}

// From the ranges of a thread's channels to the inverse scales of these channels over the whole run. The words of a
// unit's channels lie in quads, a quad of all threads after another: no two threads of a warp meet in a bank.
template <int BITS, class T>
__device__ __forceinline__ void fit(
    const unsigned (&range)[Unit<T>::SIZE][1], float (&inverse)[Unit<T>::SIZE], float* scales, long long channels,
    bool paper, const Place<T>& place) {
    constexpr int QUADS = Unit<T>::SIZE / 4;
    __shared__ uint4 ranges[QUADS][BLOCK];
    __shared__ float4 inverses[QUADS][BLOCK];
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
        ranges[q][threadIdx.x] =
            make_uint4(range[4 * q][0], range[4 * q + 1][0], range[4 * q + 2][0], range[4 * q + 3][0]);
    __syncthreads();
    for (int i = threadIdx.x; i < QUADS * 4 * place.across; i += blockDim.x) {
        const int q = i / (4 * place.across), word = i % (4 * place.across);
        unsigned whole[1] = {};
        for (int y = 0; y < place.down; ++y)
            whole[0] = max(whole[0], reinterpret_cast<const unsigned*>(ranges[q] + y * place.across)[word]);
        const Parameters p = Symmetric<BITS>::fit(whole, paper);
        reinterpret_cast<float*>(inverses[q])[word] = p.inverse;
        const long long column = (place.unit - place.x + word / 4) * Unit<T>::SIZE + 4 * q + word % 4;
        if (column < channels) scales[place.run * channels + column] = p.scale;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        const float4 own = inverses[q][place.x];
        inverse[4 * q] = own.x;
        inverse[4 * q + 1] = own.y;
        inverse[4 * q + 2] = own.z;
        inverse[4 * q + 3] = own.w;
    }
}

template <int BITS, bool STOCHASTIC, class T>
__device__ __forceinline__ void compress(
    const T* x, unsigned char* codes, float* scales, long long channels, bool paper, long long seed,
    const Place<T>& place) {
    Unit<T> held[HELD];
    unsigned range[Unit<T>::SIZE][1] = {};
    for (int tile = 0; tile < place.tiles; ++tile) {
        load(x, channels, held, place, tile);
#pragma unroll
        for (int k = 0; k < HELD; ++k)
#pragma unroll
            for (int e = 0; e < Unit<T>::SIZE; ++e) Symmetric<BITS>::include(range[e], to_float(held[k].at(e)));
    }
    float inverse[Unit<T>::SIZE];
    fit<BITS>(range, inverse, scales, channels, paper, place);
    for (int tile = 0; tile < place.tiles; ++tile) {
        if (place.tiles > 1) load(x, channels, held, place, tile);
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const long long row = place.row(tile, k), element = (place.first_row + row) * channels + place.column;
            if (!place.has(row)) continue;
            const auto packed = encode<Symmetric<BITS>, STOCHASTIC>(
                held[k], [&](int e) { return Parameters{0.0f, 0.0f, inverse[e]}; }, element, seed);
            store_codes<BITS, T>(codes + element / PER_BYTE<BITS>, packed, Unit<T>::SIZE, true);
        }
    }
}

template <int BITS, class T>
__device__ __forceinline__ void decompress(
    const unsigned char* codes, const float* scales, T* x, long long channels, const Place<T>& place) {
    if (place.unit >= place.units) return;
    float scale[Unit<T>::SIZE];
#pragma unroll
    for (int e = 0; e < Unit<T>::SIZE; ++e) scale[e] = scales[place.run * channels + place.column + e];
    const bool wide = aligned(codes);
    for (int tile = 0; tile < place.tiles; ++tile) {
        Codes<BITS, T> packed[HELD];
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const long long row = place.row(tile, k), element = (place.first_row + row) * channels + place.column;
            const int count = row < place.rows ? Unit<T>::SIZE : 0;
            packed[k] = load_codes<BITS, T>(codes + element / PER_BYTE<BITS>, count, wide);
        }
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const long long row = place.row(tile, k), element = (place.first_row + row) * channels + place.column;
            const auto unit =
                decode<Symmetric<BITS>, T>(packed[k], [&](int e) { return Parameters{scale[e], 0.0f, 0.0f}; });
            store_unit(x + element, unit, row < place.rows ? Unit<T>::SIZE : 0, true);
        }
    }
}

// Names of kernels have the WIDTH in them unless codes have 4 BITS.
#define KERNELS(WIDTH, BITS, SUFFIX, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_compress##SUFFIX(                             \
        const T* x, unsigned char* codes, float* scales, long long rows, long long channels, long long size,           \
        long long across, long long paper) {                                                                           \
        compress<BITS, false>(x, codes, scales, channels, paper, 0, Place<T>(rows, channels, size, across));           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_compress_stochastic##SUFFIX(                  \
        const T* x, unsigned char* codes, float* scales, long long seed, long long rows, long long channels,           \
        long long size, long long across, long long paper) {                                                           \
        compress<BITS, true>(x, codes, scales, channels, paper, seed, Place<T>(rows, channels, size, across));         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_decompress##SUFFIX(                           \
        const unsigned char* codes, const float* scales, T* x, long long rows, long long channels, long long size,     \
        long long across) {                                                                                            \
        decompress<BITS>(codes, scales, x, channels, Place<T>(rows, channels, size, across));                          \
    }

KERNELS(, 4, _f32, Float)
KERNELS(, 4, _f16, Half)
KERNELS(, 4, _bf16, Bfloat16)
KERNELS(8, 8, _f32, Float)
KERNELS(8, 8, _f16, Half)
KERNELS(8, 8, _bf16, Bfloat16)
