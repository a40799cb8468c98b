// Channel-wise symmetric INT4 and INT8 of a (rows, channels) tensor whose rows begin at 16-byte boundaries.
//
// A block has a run of rows and some neighbouring channels: its threads are `down` rows of 256 / down, and each has the
// channels of one 16-byte unit. A tile is what a block holds in registers: HELD rows a thread. The tensor is read once
// if a run fits in a tile; of a longer one the tiles are read again, from the cache, after the extremes are known.
#include "common.cuh"

constexpr int BLOCK = 256;  // at most
constexpr int HELD = 8;

template <class T>
constexpr int UNIT = 16 / sizeof(T);

// Where this thread's block and its elements are.
template <class T>
struct Place {
    int across, down, x, y;
    int rows;           // of the block
    long long run;      // of the block
    int unit;           // of the thread, in each row
    bool there;         // whether rows have such a unit; if not, the thread goes along with the last and stores nothing
    unsigned channels;  // of the tensor
    long long first;    // element of the block's first row and the thread's unit

    __device__ __forceinline__ Place(
        long long all_rows, long long all_channels, long long size, long long threads_across, long long blocks_across,
        long long reciprocal) {
        const int shift = __ffs((int)threads_across) - 1, units = (int)all_channels / UNIT<T>;
        const unsigned strip = divide(blockIdx.x, (unsigned)blocks_across, (unsigned)reciprocal);
        across = (int)threads_across;
        down = blockDim.x >> shift;
        x = threadIdx.x & (across - 1);
        y = threadIdx.x >> shift;
        run = strip;
        unit = (int)((blockIdx.x - strip * (unsigned)blocks_across) << shift) + x;
        there = unit < units;
        channels = (unsigned)all_channels;
        rows = (int)min(size, all_rows - run * size);
        first = run * size * all_channels + min(unit, units - 1) * UNIT<T>;
    }

    // The rows from one tile to the next.
    __device__ __forceinline__ int step() const { return HELD * down; }

    // The k-th row of the thread in the tile at `tile`, counted from the run's first one on.
    __device__ __forceinline__ int row(int tile, int k) const { return tile + k * down + y; }

    // The first element of the thread's unit in a row.
    __device__ __forceinline__ long long element(int row) const {
        return first + (long long)((unsigned long long)(unsigned)row * channels);
    }

    // The same in the k-th row of a tile, or else in the run's last row, which to read twice changes nothing.
    __device__ __forceinline__ long long some_element(int tile, int k) const {
        return element(min(row(tile, k), rows - 1));
    }
};

template <class T>
using Unit = Chunk<T, UNIT<T>>;

// From the ranges of a thread's channels, four words of them, to the inverse scales of these channels over the whole
// run. The words lie in quads, a quad of all threads after another: no two threads of a warp meet in a bank.
template <int BITS, class T>
__device__ __forceinline__ void fit(
    const Range<T> (&range)[4], float (&inverse)[UNIT<T>], float* scales, bool paper, const Place<T>& place) {
    constexpr int QUADS = UNIT<T> / 4;
    __shared__ uint4 highs[BLOCK], lows[BLOCK];
    __shared__ float4 inverses[QUADS][BLOCK];
    highs[threadIdx.x] = make_uint4(range[0].high, range[1].high, range[2].high, range[3].high);
    lows[threadIdx.x] = make_uint4(range[0].low, range[1].low, range[2].low, range[3].low);
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * place.across; i += blockDim.x) {
        const int x = i / 4;
        Range<T> whole;
        for (int y = 0; y < place.down; ++y)
            whole.merge(
                reinterpret_cast<const unsigned*>(highs + y * place.across)[i],
                reinterpret_cast<const unsigned*>(lows + y * place.across)[i]);
#pragma unroll
        for (int k = 0; k < PER_WORD<T>; ++k) {
            const Parameters p = Symmetric<BITS>::fit(number<T>(whole.high, k), number<T>(whole.low, k), paper);
            const int of_unit = i % 4 * PER_WORD<T> + k;
            const unsigned channel = (unsigned)(place.unit - place.x + x) * UNIT<T> + of_unit;
            reinterpret_cast<float*>(inverses[of_unit / 4] + x)[of_unit % 4] = p.inverse;
            if (channel < place.channels) scales[place.run * place.channels + channel] = p.scale;
        }
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

template <class T>
__device__ __forceinline__ void load(const T* x, Unit<T> (&held)[HELD], const Place<T>& place, int tile) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) held[k].load(x + place.some_element(tile, k));
}

template <int BITS, bool STOCHASTIC, class T>
__device__ __forceinline__ void compress(
    const T* x, unsigned char* codes, float* scales, bool paper, long long seed, const Place<T>& place) {
    Unit<T> held[HELD];
    Range<T> range[4];
    int tile = 0;
    for (;; tile += place.step()) {
        load(x, held, place, tile);
#pragma unroll
        for (int k = 0; k < HELD; ++k)
#pragma unroll
            for (int w = 0; w < 4; ++w) range[w].include(held[k].words[w]);
        if (tile + place.step() >= place.rows) break;
    }
    float inverse[UNIT<T>];
    fit<BITS>(range, inverse, scales, paper, place);
    if (!place.there) return;
    for (;; load(x, held, place, tile)) {  // the last tile first: it has been loaded
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const int row = place.row(tile, k);
            const long long element = place.element(row);
            if (row < place.rows)
                encode<Symmetric<BITS>, STOCHASTIC>(
                    held[k], [&](int e) { return Parameters{0.0f, 0.0f, inverse[e]}; }, element, seed)
                    .store(codes + (unsigned long long)element / PER_BYTE<BITS>);
        }
        if (tile == 0) break;
        tile -= place.step();
    }
}

// Codes of a unit, at any address.
template <int BITS, class T>
__device__ __forceinline__ Codes<BITS, UNIT<T>> load_codes(const unsigned char* bytes, bool wide) {
    Codes<BITS, UNIT<T>> codes = {};
    if (wide) codes.load(bytes);
    else
#pragma unroll
        for (int k = 0; k < codes.BYTES; ++k) codes.words[k / 4] |= (unsigned)bytes[k] << k % 4 * 8;
    return codes;
}

template <int BITS, class T>
__device__ __forceinline__ void decompress(
    const unsigned char* codes, const float* scales, T* x, const Place<T>& place) {
    if (!place.there) return;
    float scale[UNIT<T>];
#pragma unroll
    for (int e = 0; e < UNIT<T>; ++e) scale[e] = scales[place.run * place.channels + place.unit * UNIT<T> + e];
    const bool wide = aligned(codes);
    for (int tile = 0; tile < place.rows; tile += place.step()) {
        Codes<BITS, UNIT<T>> held[HELD];
#pragma unroll
        for (int k = 0; k < HELD; ++k)
            held[k] = load_codes<BITS, T>(
                codes + (unsigned long long)place.some_element(tile, k) / PER_BYTE<BITS>, wide);
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const int row = place.row(tile, k);
            if (row < place.rows)
                decode<Symmetric<BITS>, T>(held[k], [&](int e) { return Parameters{scale[e], 0.0f, 0.0f}; })
                    .store(x + place.element(row));
        }
    }
}

#define KERNELS(WIDTH, BITS, SUFFIX, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_compress##SUFFIX(                             \
        const T* x, unsigned char* codes, float* scales, long long rows, long long channels, long long size,           \
        long long across, long long blocks_across, long long reciprocal, long long paper) {                            \
        const Place<T> place(rows, channels, size, across, blocks_across, reciprocal);                                 \
        compress<BITS, false>(x, codes, scales, paper, 0, place);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_compress_stochastic##SUFFIX(                  \
        const T* x, unsigned char* codes, float* scales, long long seed, long long rows, long long channels,           \
        long long size, long long across, long long blocks_across, long long reciprocal, long long paper) {            \
        const Place<T> place(rows, channels, size, across, blocks_across, reciprocal);                                 \
        compress<BITS, true>(x, codes, scales, paper, seed, place);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) channel##WIDTH##_decompress##SUFFIX(                           \
        const unsigned char* codes, const float* scales, T* x, long long rows, long long channels, long long size,     \
        long long across, long long blocks_across, long long reciprocal) {                                             \
        decompress<BITS>(codes, scales, x, Place<T>(rows, channels, size, across, blocks_across, reciprocal));         \
    }

FOR_EACH_WIDTH(KERNELS)
