// Groups of neighbours in memory: group-wise, token-wise, asymmetric and outlier-separated INT4 and INT8.
//
// A team of threads (a power of two, 256 at most) has a group; a block has 256 / team groups, one after the other in
// memory. A tile is what a team holds in registers: 16 elements a thread. The tensor is read once if a group fits in a
// tile; of a longer one the tiles are read again, from the cache, after the extreme is known.
#include "common.cuh"

constexpr int BLOCK = 256;
constexpr int HELD = 16;  // elements a thread

// Where this thread's team and its elements are.
template <class T>
struct Place {
    static constexpr int UNITS = HELD / Unit<T>::SIZE;
    int team, lane, tiles;
    long long group, first, count;   // of the team: its group, and the group's elements
    long long window, window_count;  // of the block: the elements of its groups

    __device__ __forceinline__ Place(long long numel, long long size, long long threads) {
        const int shift = __ffs((int)threads) - 1;
        team = (int)threads;
        lane = threadIdx.x & (team - 1);
        tiles = (int)((size + (HELD << shift) - 1) >> shift) / HELD;
        const long long block_group = (long long)blockIdx.x * (BLOCK >> shift);
        group = block_group + (threadIdx.x >> shift);
        first = group * size;
        count = min(size, numel - first);
        window = block_group * size;
        window_count = min(size * (BLOCK >> shift), numel - window);
    }

    // The first element of the team's part of a tile.
    __device__ __forceinline__ long long start(int tile) const { return first + (long long)tile * team * HELD; }

    // From there on: where the k-th unit of the thread begins, and how many of its elements exist.
    __device__ __forceinline__ int offset(int k) const { return (k * team + lane) * Unit<T>::SIZE; }

    __device__ __forceinline__ int filled(int tile, int k) const {
        return ::filled<T>(count - (long long)tile * team * HELD - offset(k));
    }
};

template <class T, bool OUTLIERS>
struct Source;

template <class T>
struct Source<T, false> {
    const T* x;
    bool wide;

    __device__ __forceinline__ void load(Unit<T> (&held)[Place<T>::UNITS], const Place<T>& place, int tile) const {
        const T* start = x + place.start(tile);
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k)
            held[k] = load_unit(start + place.offset(k), place.filled(tile, k), wide);
    }
};

// The outlier channels of a (rows, width) tensor. `lanes`: a power of two, 256 at most; threads that share a row.
struct Outliers {
    long long width, capacity, lanes;

    // Call visit(position, raw index) for each outlier in `count` elements from `start` on; the block's threads share
    // the work.
    template <class Index, class Visit>
    __device__ __forceinline__ void each(const Index* channels, long long start, long long count, Visit visit) const {
        const long long first = start / width, skipped = start - first * width;
        const int shift = __ffs((int)lanes) - 1;
        for (long long row = threadIdx.x >> shift; row * width - skipped < count; row += BLOCK >> shift)
            for (int column = threadIdx.x & ((int)lanes - 1); column < capacity; column += (int)lanes) {
                const long long position = row * width - skipped + channels[column];
                if (position >= 0 && position < count) visit(position, (first + row) * capacity + column);
            }
    }
};

template <class T>
struct Source<T, true> {
    const T* x;
    bool wide;
    Outliers outliers;
    const long long* channels;
    T* raw;
    unsigned char* flags;  // shared, 16-byte aligned: one for each element of a block's tile

    // Store the outliers of a tile raw, and load the tile with zeros in their places.
    __device__ __forceinline__ void load(Unit<T> (&held)[Place<T>::UNITS], const Place<T>& place, int tile) const {
        Source<T, false>{x, wide}.load(held, place, tile);
        const long long skipped = (long long)tile * BLOCK * HELD, start = place.window + skipped;
        const long long count = min(place.window_count - skipped, (long long)BLOCK * HELD);
        __syncthreads();
        reinterpret_cast<uint4*>(flags)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        outliers.each(channels, start, count, [&](long long position, long long index) {
            flags[position] = 1;
            raw[index] = x[start + position];
        });
        __syncthreads();
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k)
            clear(held[k], flags + (place.start(tile) - start) + place.offset(k), place.filled(tile, k));
    }

    __device__ __forceinline__ void clear(Unit<T>& unit, const unsigned char* flags, int count) const {
        if (wide && count == Unit<T>::SIZE) {
            const unsigned* words = reinterpret_cast<const unsigned*>(flags);
            if (!(Unit<T>::SIZE == 8 ? words[0] | words[1] : words[0])) return;
        }
#pragma unroll
        for (int k = 0; k < Unit<T>::SIZE; ++k)
            if (k < count && flags[k]) unit.clear(k);
    }
};

// The greatest of each word over the team, in all its threads.
template <int WORDS>
__device__ __forceinline__ void merge(unsigned (&range)[WORDS], int team) {
    __shared__ unsigned merged[WORDS][BLOCK / WARP];
    for (int step = min(team, WARP) / 2; step; step /= 2)
        for (int w = 0; w < WORDS; ++w) range[w] = max(range[w], __shfl_xor_sync(ALL_LANES, range[w], step));
    if (team <= WARP) return;
    const int warp = threadIdx.x / WARP, warps = team / WARP;
    if (threadIdx.x % WARP == 0)
        for (int w = 0; w < WORDS; ++w) merged[w][warp] = range[w];
    __syncthreads();
    for (int other = warp & ~(warps - 1), i = 0; i < warps; ++i)
        for (int w = 0; w < WORDS; ++w) range[w] = max(range[w], merged[w][other + i]);
}

template <class Q, bool STOCHASTIC, class T, bool OUTLIERS>
__device__ __forceinline__ void compress(
    const Source<T, OUTLIERS>& source, unsigned char* codes, float* scales, float* offsets, const Place<T>& place,
    bool paper, long long seed) {
    Unit<T> held[Place<T>::UNITS];
    unsigned range[Q::WORDS] = {};
    for (int tile = 0; tile < place.tiles; ++tile) {
        source.load(held, place, tile);
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k)
            include<Q>(range, held[k], place.filled(tile, k));
    }
    merge(range, place.team);
    const Parameters p = Q::fit(range, paper);
    if (place.lane == 0 && place.count > 0) {
        scales[place.group] = p.scale;
        if (Q::OFFSET) offsets[place.group] = p.offset;
    }
    for (int tile = 0; tile < place.tiles; ++tile) {
        if (place.tiles > 1) source.load(held, place, tile);
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k) {
            const long long element = place.start(tile) + place.offset(k);
            const auto packed = encode<Q, STOCHASTIC>(held[k], [&](int) { return p; }, element, seed);
            store_codes<Q::BITS, T>(codes + element / PER_BYTE<Q::BITS>, packed, place.filled(tile, k), source.wide);
        }
    }
}

template <class Q, class T>
__device__ __forceinline__ void decompress(
    const unsigned char* codes, const float* scales, const float* offsets, T* x, const Place<T>& place, bool wide) {
    Parameters p = {};
    if (place.count > 0) p = {scales[place.group], Q::OFFSET ? offsets[place.group] : 0.0f, 0.0f};
    for (int tile = 0; tile < place.tiles; ++tile) {
        Codes<Q::BITS, T> packed[Place<T>::UNITS];
        const unsigned char* start = codes + place.start(tile) / PER_BYTE<Q::BITS>;
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k)
            packed[k] = load_codes<Q::BITS, T>(
                start + place.offset(k) / PER_BYTE<Q::BITS>, place.filled(tile, k), wide);
#pragma unroll
        for (int k = 0; k < Place<T>::UNITS; ++k) {
            const Unit<T> unit = decode<Q, T>(packed[k], [&](int) { return p; });
            store_unit(x + place.start(tile) + place.offset(k), unit, place.filled(tile, k), wide);
        }
    }
}

// Whether all units of all groups are aligned.
template <class T>
__device__ __forceinline__ bool wide_access(const T* x, const unsigned char* codes, long long size) {
    return size % Unit<T>::SIZE == 0 && aligned(x) && aligned(codes);
}

// Names of kernels have the WIDTH in them unless codes have 4 BITS.
#define COMPRESSORS(WIDTH, BITS, SUFFIX, T, STOCHASTIC, SEED, ...)                                                     \
    extern "C" __global__ void __launch_bounds__(BLOCK, STOCHASTIC ? 4 : 1) group##WIDTH##_compress##SUFFIX(           \
        const T* x, unsigned char* codes, float* scales, __VA_ARGS__ long long numel, long long size, long long team,  \
        long long paper) {                                                                                             \
        const Source<T, false> source = {x, wide_access(x, codes, size)};                                              \
        const Place<T> place(numel, size, team);                                                                       \
        compress<Symmetric<BITS>, STOCHASTIC>(source, codes, scales, nullptr, place, paper, SEED);                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, STOCHASTIC ? 4 : 1) asymmetric##WIDTH##_compress##SUFFIX(      \
        const T* x, unsigned char* codes, float* scales, float* offsets, __VA_ARGS__ long long numel, long long size,  \
        long long team) {                                                                                              \
        const Source<T, false> source = {x, wide_access(x, codes, size)};                                              \
        const Place<T> place(numel, size, team);                                                                       \
        compress<Asymmetric<BITS>, STOCHASTIC>(source, codes, scales, offsets, place, false, SEED);                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, STOCHASTIC ? 3 : 4) outlier##WIDTH##_compress##SUFFIX(         \
        const T* x, unsigned char* codes, float* scales, T* raw, int* indices, const long long* channels,              \
        __VA_ARGS__ long long numel, long long size, long long team, long long paper, long long width,                 \
        long long capacity, long long lanes) {                                                                         \
        __shared__ uint4 flags[BLOCK * HELD / sizeof(uint4)];                                                          \
        const Source<T, true> source = {x, wide_access(x, codes, size), {width, capacity, lanes},                      \
                                        channels, raw, reinterpret_cast<unsigned char*>(flags)};                       \
        const Place<T> place(numel, size, team);                                                                       \
        if (blockIdx.x == 0)                                                                                           \
            for (long long i = threadIdx.x; i < capacity; i += BLOCK) indices[i] = (int)channels[i];                   \
        compress<Symmetric<BITS>, STOCHASTIC>(source, codes, scales, nullptr, place, paper, SEED);                     \
    }

#define DECOMPRESSORS(WIDTH, BITS, SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK) group##WIDTH##_decompress##SUFFIX(                             \
        const unsigned char* codes, const float* scales, T* x, long long numel, long long size, long long team) {      \
        const Place<T> place(numel, size, team);                                                                       \
        decompress<Symmetric<BITS>>(codes, scales, nullptr, x, place, wide_access(x, codes, size));                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) asymmetric##WIDTH##_decompress##SUFFIX(                        \
        const unsigned char* codes, const float* scales, const float* offsets, T* x, long long numel, long long size,  \
        long long team) {                                                                                              \
        const Place<T> place(numel, size, team);                                                                       \
        decompress<Asymmetric<BITS>>(codes, scales, offsets, x, place, wide_access(x, codes, size));                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) outlier##WIDTH##_decompress##SUFFIX(                           \
        const unsigned char* codes, const float* scales, const T* raw, const int* indices, T* x, long long numel,      \
        long long size, long long team, long long width, long long capacity, long long lanes) {                        \
        const Place<T> place(numel, size, team);                                                                       \
        decompress<Symmetric<BITS>>(codes, scales, nullptr, x, place, wide_access(x, codes, size));                    \
        __syncthreads();  /* the block's own stores come first */                                                      \
        const Outliers outliers = {width, capacity, lanes};                                                            \
        outliers.each(indices, place.window, place.window_count, [&](long long position, long long index) {            \
            x[place.window + position] = raw[index];                                                                   \
        });                                                                                                            \
    }

#define KERNELS(WIDTH, BITS, SUFFIX, T)                                                                                \
    COMPRESSORS(WIDTH, BITS, SUFFIX, T, false, 0,)                                                                     \
    COMPRESSORS(WIDTH, BITS, _stochastic##SUFFIX, T, true, seed, long long seed,)                                      \
    DECOMPRESSORS(WIDTH, BITS, SUFFIX, T)

KERNELS(, 4, _f32, Float)
KERNELS(, 4, _f16, Half)
KERNELS(, 4, _bf16, Bfloat16)
KERNELS(8, 8, _f32, Float)
KERNELS(8, 8, _f16, Half)
KERNELS(8, 8, _bf16, Bfloat16)
