// Groups of neighbours in memory: group-wise, token-wise, asymmetric and outlier-separated INT4 and INT8.
//
// To compress, a team of threads (a power of two, 256 at most) has a group; a block has 256 / team groups, one after
// the other in memory. A tile is what a team holds in registers: 128 bytes a thread, which are HELD chunks. The tensor
// is read once if a group fits in a tile; of a longer one the tiles are read again, from the cache, after the extremes
// are known. A block takes whole chunks if all its groups consist of such at aligned addresses; otherwise it goes
// element by element, and reads twice.
//
// To decompress, a block has a window of 32 KiB, wherever groups begin. Its threads take 16-byte units in turns, so
// that what a warp stores at once is one piece of memory: the first-level cache, which puts together small pieces for
// loads, passes on each that is stored. They take whole units if no unit has numbers of two groups; otherwise they go
// element by element.
#include "common.cuh"

constexpr int BLOCK = 256;
constexpr int CHUNK = 16;  // neighbours
template <class T>
constexpr int HELD = 128 / (CHUNK * sizeof(T));

template <class T>
constexpr int UNIT = 16 / sizeof(T);
constexpr int UNITS = 8;  // of a thread that decompresses

// Where this thread's block, its team and its group are. Places in a block are counted from its first element on.
template <class T>
struct Place {
    int team, lane, size;
    long long window, first_group;  // of the block: its first element, its first group
    int window_count;               // elements of the block
    int group, begin, count;        // of the team: its group in the block, the group's first element, its elements
    bool there;  // whether the team has a group; if not, it goes along with the block's first and stores nothing

    __device__ __forceinline__ Place(long long numel, long long group_size, long long threads) {
        const int shift = __ffs((int)threads) - 1;
        const unsigned groups = BLOCK >> shift;
        team = (int)threads;
        size = (int)group_size;
        lane = threadIdx.x & (team - 1);
        first_group = (long long)blockIdx.x * groups;
        window = (long long)((unsigned long long)blockIdx.x * (groups * size));
        window_count = (int)min((long long)(groups * size), numel - window);
        group = threadIdx.x >> shift;
        there = group * size < window_count;
        begin = there ? group * size : 0;
        count = min(size, window_count - begin);
    }

    // The elements from one tile to the next.
    __device__ __forceinline__ int step() const { return team * (HELD<T> * CHUNK); }

    // Where the thread's k-th chunk of the tile at `tile` begins, counted from the group's first element on.
    __device__ __forceinline__ int chunk(int tile, int k) const { return tile + (k * team + lane) * CHUNK; }

    // The same counted from the block's first element on, or else the group's last chunk: to read that twice changes
    // nothing.
    __device__ __forceinline__ int some_chunk(int tile, int k) const {
        return begin + min(chunk(tile, k), count - CHUNK);
    }

    // Whether the block takes whole chunks.
    __device__ __forceinline__ bool whole(const T* x, const unsigned char* codes) const {
        return (size | window_count) % CHUNK == 0 && aligned(x) && aligned(codes);
    }
};

// Where a block's numbers come from: all of them from the tensor.
template <class T>
struct Everything {
    const T* x;  // the block's

    __device__ __forceinline__ T element(int at) const { return x[at]; }
    __device__ __forceinline__ void mask(Chunk<T, CHUNK>&, int) const {}
};

// A tensor's parts of `size` neighbours, rows or groups, as a block sees them whose first element is `window`.
// `reciprocal`: of the size, see `divide`.
struct Parts {
    int size;
    unsigned reciprocal;
    int skipped;  // elements of the block's first part that are before the block
    long long first;

    __device__ __forceinline__ Parts(long long part_size, long long part_reciprocal, long long window)
        : size((int)part_size), reciprocal((unsigned)((unsigned long long)part_reciprocal >> 32)) {
        using Unsigned = unsigned long long;
        first = (long long)divide((Unsigned)window, (Unsigned)part_size, (Unsigned)part_reciprocal);
        skipped = (int)(window - first * part_size);
    }

    // The part of an element of the block, counted from the first one on.
    __device__ __forceinline__ unsigned part(int at) const {
        return divide((unsigned)skipped + (unsigned)at, (unsigned)size, reciprocal);
    }

    // The place of an element of the block in its part.
    __device__ __forceinline__ unsigned place(int at) const {
        return (unsigned)skipped + (unsigned)at - part(at) * (unsigned)size;
    }
};

// The outlier channels of a tensor's rows.
struct Outliers {
    Parts rows;
    int capacity, lanes;  // lanes: the least power of two that is not less than the capacity

    __device__ __forceinline__ Outliers(
        long long width, long long capacity, long long lanes, long long reciprocal, long long window)
        : rows(width, reciprocal, window), capacity((int)capacity), lanes((int)lanes) {}

    // Call visit(element of the block, raw index less that of the first row) for each outlier; the threads share them.
    template <class Index, class Visit>
    __device__ __forceinline__ void each(const Index* channels, int window_count, Visit visit) const {
        const int shift = __ffs(lanes) - 1;
#pragma unroll 1
        for (int i = threadIdx.x;; i += BLOCK) {
            const int row = i >> shift, column = i & (lanes - 1);
            const long long start = (long long)row * rows.size - rows.skipped;
            if (start >= window_count) break;
            if (column >= capacity) continue;
            const long long at = start + channels[column];
            if (at >= 0 && at < window_count) visit((int)at, row * capacity + column);
        }
    }
};

// Numbers with zeros in place of outliers. `kept`: for each channel a mask, zero for an outlier channel.
template <class T>
struct Normals {
    const T *x, *kept;
    const Outliers& outliers;

    __device__ __forceinline__ T element(int at) const {
        T one = x[at];
        one.bits &= kept[outliers.rows.place(at)].bits;
        return one;
    }

    // Clear the outliers of a chunk. Its channels are of one row.
    __device__ __forceinline__ void mask(Chunk<T, CHUNK>& chunk, int at) const {
        Chunk<T, CHUNK> masks;
        masks.load(kept + outliers.rows.place(at));
#pragma unroll
        for (int w = 0; w < chunk.WORDS; ++w) chunk.words[w] &= masks.words[w];
    }
};

// The range of all of a team's numbers, in all its threads.
template <class T>
__device__ __forceinline__ void merge(Range<T>& range, int team) {
    __shared__ unsigned highs[BLOCK / WARP], lows[BLOCK / WARP];
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        if (step >= team) return;
        range.merge(__shfl_xor_sync(ALL_LANES, range.high, step), __shfl_xor_sync(ALL_LANES, range.low, step));
    }
    if (team <= WARP) return;
    const int warp = threadIdx.x / WARP, warps = team / WARP;
    if (threadIdx.x % WARP == 0) {
        highs[warp] = range.high;
        lows[warp] = range.low;
    }
    __syncthreads();
    for (int other = warp & ~(warps - 1), i = 0; i < warps; ++i) range.merge(highs[other + i], lows[other + i]);
}

template <class Source, class T>
__device__ __forceinline__ void load(
    const Source& source, Chunk<T, CHUNK> (&held)[HELD<T>], const Place<T>& place, int tile) {
#pragma unroll
    for (int k = 0; k < HELD<T>; ++k) held[k].load(source.x + place.some_chunk(tile, k));
#pragma unroll
    for (int k = 0; k < HELD<T>; ++k) source.mask(held[k], place.some_chunk(tile, k));
}

template <class Q, bool STOCHASTIC, class T, template <class> class Source>
__device__ __forceinline__ void compress(
    const Source<T>& source, unsigned char* codes, float* scales, float* offsets, const Place<T>& place, bool whole,
    bool paper, long long seed) {
    codes += (unsigned long long)place.window / PER_BYTE<Q::BITS>;
    Chunk<T, CHUNK> held[HELD<T>];
    Range<T> range;
    int tile = 0;
    if (whole)
        for (;; tile += place.step()) {
            load(source, held, place, tile);
#pragma unroll
            for (int k = 0; k < HELD<T>; ++k)
#pragma unroll
                for (int w = 0; w < held[k].WORDS; ++w) range.include(held[k].words[w]);
            if (tile + place.step() >= place.size) break;
        }
    else
        for (int k = place.lane; k < place.count; k += place.team) range.include_one(source.element(place.begin + k));
    merge(range, place.team);
    range.fold();
    const Parameters p = Q::fit(number<T>(range.high, 0), number<T>(range.low, 0), paper);
    if (!place.there) return;
    if (place.lane == 0) {
        const long long group = place.first_group + place.group;
        scales[group] = p.scale;
        if (Q::OFFSET) offsets[group] = p.offset;
    }
    if (whole)
        for (;; load(source, held, place, tile)) {  // the last tile first: it has been loaded
#pragma unroll
            for (int k = 0; k < HELD<T>; ++k) {
                const int at = place.chunk(tile, k), element = place.begin + at;
                if (at < place.count)
                    encode<Q, STOCHASTIC>(held[k], [&](int) { return p; }, place.window + element, seed)
                        .store(codes + (unsigned)element / PER_BYTE<Q::BITS>);
            }
            if (tile == 0) break;
            tile -= place.step();
        }
    else
        for (int k = 2 * place.lane; k < place.count; k += 2 * place.team) {
            const int element = place.begin + k;
            const bool both = k + 1 < place.count;
            const float x[2] = {to_float(source.element(element)), both ? to_float(source.element(element + 1)) : 0.0f};
            store_pair<Q, STOCHASTIC>(codes, x, {p, p}, element, both, place.window + element, seed);
        }
}

// Where a block that decompresses is.
template <class T>
struct Window {
    long long first;  // element
    int count;        // of its elements
    Parts groups;

    __device__ __forceinline__ Window(long long numel, long long size, long long reciprocal)
        : first((long long)blockIdx.x * (UNITS * BLOCK * UNIT<T>)),
          count((int)min((long long)(UNITS * BLOCK * UNIT<T>), numel - first)), groups(size, reciprocal, first) {}

    // Where the thread's k-th unit begins, counted from the block's first element on.
    __device__ __forceinline__ int unit(int k) const { return (k * BLOCK + (int)threadIdx.x) * UNIT<T>; }

    // The same, or else the block's last unit: to read that twice changes nothing.
    __device__ __forceinline__ int some_unit(int k) const { return min(unit(k), count - UNIT<T>); }

    // Whether the block takes whole units, each of one group.
    __device__ __forceinline__ bool whole(const T* x, const unsigned char* codes) const {
        return (groups.size | count) % UNIT<T> == 0 && aligned(x) && aligned(codes);
    }
};

template <class Q, class T>
__device__ __forceinline__ void decompress(
    const unsigned char* codes, const float* scales, const float* offsets, T* x, const Window<T>& window) {
    const bool whole = window.whole(x, codes);
    codes += (unsigned long long)window.first / PER_BYTE<Q::BITS>;
    x += window.first;
    scales += window.groups.first;
    if (Q::OFFSET) offsets += window.groups.first;
    const auto parameters = [&](int at) {
        const unsigned group = window.groups.part(at);
        return Parameters{scales[group], Q::OFFSET ? offsets[group] : 0.0f, 0.0f};
    };
    if (whole) {
        Codes<Q::BITS, UNIT<T>> held[UNITS];
        Parameters p[UNITS];
#pragma unroll
        for (int k = 0; k < UNITS; ++k) {
            held[k].load(codes + (unsigned)window.some_unit(k) / PER_BYTE<Q::BITS>);
            p[k] = parameters(window.some_unit(k));
        }
#pragma unroll
        for (int k = 0; k < UNITS; ++k)
            if (window.unit(k) < window.count)
                decode<Q, T>(held[k], [&](int) { return p[k]; }).store(x + window.unit(k));
    } else
        for (int at = threadIdx.x; at < window.count; at += BLOCK)
            from_float(restore<Q>(codes, at, parameters(at)), x[at]);
}

#define COMPRESSORS(WIDTH, BITS, SUFFIX, T, STOCHASTIC, SEED, ...)                                                     \
    extern "C" __global__ void __launch_bounds__(BLOCK, STOCHASTIC ? 2 : 3) group##WIDTH##_compress##SUFFIX(           \
        const T* x, unsigned char* codes, float* scales, __VA_ARGS__ long long numel, long long size, long long team,  \
        long long paper) {                                                                                             \
        const Place<T> place(numel, size, team);                                                                       \
        const Everything<T> source = {x + place.window};                                                               \
        compress<Symmetric<BITS>, STOCHASTIC>(                                                                         \
            source, codes, scales, nullptr, place, place.whole(x, codes), paper, SEED);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, STOCHASTIC ? 2 : 3) asymmetric##WIDTH##_compress##SUFFIX(      \
        const T* x, unsigned char* codes, float* scales, float* offsets, __VA_ARGS__ long long numel, long long size,  \
        long long team) {                                                                                              \
        const Place<T> place(numel, size, team);                                                                       \
        const Everything<T> source = {x + place.window};                                                               \
        compress<Asymmetric<BITS>, STOCHASTIC>(                                                                        \
            source, codes, scales, offsets, place, place.whole(x, codes), false, SEED);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, 2) outlier##WIDTH##_compress##SUFFIX(                          \
        const T* x, unsigned char* codes, float* scales, T* raw, int* indices, const long long* channels,              \
        const T* kept, __VA_ARGS__ long long numel, long long size, long long team, long long paper, long long width,  \
        long long capacity, long long lanes, long long reciprocal) {                                                   \
        const Place<T> place(numel, size, team);                                                                       \
        const Outliers outliers(width, capacity, lanes, reciprocal, place.window);                                     \
        const Normals<T> source = {x + place.window, kept, outliers};                                                  \
        compress<Symmetric<BITS>, STOCHASTIC>(                                                                         \
            source, codes, scales, nullptr, place, place.whole(x, codes) && width % CHUNK == 0, paper, SEED);          \
        raw += outliers.rows.first * capacity;                                                                         \
        outliers.each(channels, place.window_count, [&](int at, int index) { raw[index] = source.x[at]; });            \
        if (blockIdx.x == 0)                                                                                           \
            for (int i = threadIdx.x; i < capacity; i += BLOCK) indices[i] = (int)channels[i];                         \
    }

#define DECOMPRESSORS(WIDTH, BITS, SUFFIX, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK, 4) group##WIDTH##_decompress##SUFFIX(                          \
        const unsigned char* codes, const float* scales, T* x, long long numel, long long size,                        \
        long long size_reciprocal) {                                                                                   \
        decompress<Symmetric<BITS>>(codes, scales, nullptr, x, Window<T>(numel, size, size_reciprocal));               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, 4) asymmetric##WIDTH##_decompress##SUFFIX(                     \
        const unsigned char* codes, const float* scales, const float* offsets, T* x, long long numel, long long size,  \
        long long size_reciprocal) {                                                                                   \
        decompress<Asymmetric<BITS>>(codes, scales, offsets, x, Window<T>(numel, size, size_reciprocal));              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK, 4) outlier##WIDTH##_decompress##SUFFIX(                        \
        const unsigned char* codes, const float* scales, const T* raw, const int* indices, T* x, long long numel,      \
        long long size, long long size_reciprocal, long long width, long long capacity, long long lanes,               \
        long long reciprocal) {                                                                                        \
        const Window<T> window(numel, size, size_reciprocal);                                                          \
        decompress<Symmetric<BITS>>(codes, scales, nullptr, x, window);                                                \
        const Outliers outliers(width, capacity, lanes, reciprocal, window.first);                                     \
        raw += outliers.rows.first * capacity;                                                                         \
        x += window.first;                                                                                             \
        __syncthreads();  /* the block's own stores come first */                                                      \
        outliers.each(indices, window.count, [&](int at, int index) { x[at] = raw[index]; });                          \
    }

#define KERNELS(WIDTH, BITS, SUFFIX, T)                                                                                \
    COMPRESSORS(WIDTH, BITS, SUFFIX, T, false, 0,)                                                                     \
    COMPRESSORS(WIDTH, BITS, _stochastic##SUFFIX, T, true, seed, long long seed,)                                      \
    DECOMPRESSORS(WIDTH, BITS, SUFFIX, T)

FOR_EACH_WIDTH(KERNELS)
