// One bit an element, of a tensor of two bit patterns.
//
// A block has a tile. It marks the elements that differ from the tile's first one, finds a pattern among them, and
// turns the marks over if that is the lesser one. So the tensor is read once.
#include "common.cuh"

constexpr int BLOCK = 256;
constexpr int TILE = 1 << 14;  // elements; TILE in reference/bits.py
constexpr int HELD = 4;        // units a thread

// ---- units: what one 16-byte access moves ----

// Whole words, so that nothing waits for what is loaded before it is used.
template <class T>
struct alignas(16) Unit {
    static constexpr int SIZE = 16 / sizeof(T);
    unsigned words[4];

    __device__ __forceinline__ T at(int k) const {
        T x;
        using Bits = decltype(x.bits);
        if constexpr (sizeof(T) == 8) x.bits = (Bits)((unsigned long long)words[2 * k + 1] << 32 | words[2 * k]);
        else x.bits = (Bits)(words[k / PER_WORD] >> shift(k));
        return x;
    }

    // Put an element where the unit is zero.
    __device__ __forceinline__ void put(int k, T x) {
        if constexpr (sizeof(T) == 8) {
            words[2 * k] = (unsigned)x.bits;
            words[2 * k + 1] = (unsigned)(x.bits >> 32);
        } else words[k / PER_WORD] |= ((unsigned)x.bits & MASK) << shift(k);
    }

    __device__ __forceinline__ void clear(int k) { words[k / PER_WORD] &= ~(MASK << shift(k)); }

private:
    static constexpr int PER_WORD = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
    static constexpr unsigned MASK = 0xffffffffu >> (32 - 32 / PER_WORD);

    static __device__ __forceinline__ int shift(int k) { return k % PER_WORD * (32 / PER_WORD); }
};

// How many elements of a unit exist, if `left` elements of the tensor remain from the unit's first one on.
template <class T>
__device__ __forceinline__ int filled(long long left) {
    return (int)max(0LL, min(left, (long long)Unit<T>::SIZE));
}

// The first `count` elements at `x`; the others are zero. `wide`: `x` is aligned, so that a whole unit can be loaded.
template <class T>
__device__ __forceinline__ Unit<T> load_unit(const T* x, int count, bool wide) {
    if (wide && count == Unit<T>::SIZE) return *reinterpret_cast<const Unit<T>*>(x);
    Unit<T> unit = {};
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; ++k)
        if (k < count) unit.put(k, x[k]);
    return unit;
}

template <class T>
__device__ __forceinline__ void store_unit(T* x, const Unit<T>& unit, int count, bool wide) {
    if (wide && count == Unit<T>::SIZE) {
        *reinterpret_cast<Unit<T>*>(x) = unit;
        return;
    }
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; ++k)
        if (k < count) x[k] = unit.at(k);
}

// A word of bits for each 32 elements, from the few bits of each of the lanes that share it.
template <int SIZE>
__device__ __forceinline__ unsigned gather(unsigned bits) {
    constexpr int LANES = 32 / SIZE;
    unsigned word = bits << SIZE * (threadIdx.x % LANES);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) word |= __shfl_xor_sync(ALL_LANES, word, step);
    return word;
}

// Store the bytes of a word that hold bits, if `left` elements remain from the word's first one on.
__device__ __forceinline__ void store_word(unsigned char* bits, unsigned word, long long left) {
    if (left >= 32) {
        *reinterpret_cast<unsigned*>(bits) = word;
        return;
    }
    for (int k = 0; 8 * k < left; ++k) bits[k] = (unsigned char)(word >> 8 * k);
}

// A pattern that differs from `first` in any thread of the block, or `first` if none does. All threads get the same.
template <class Bits>
__device__ __forceinline__ Bits find_other(Bits other, Bits first) {
    __shared__ Bits found[BLOCK / WARP];
    const unsigned differing = __ballot_sync(ALL_LANES, other != first);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == (differing ? __ffs(differing) - 1 : 0)) found[warp] = other;
    __syncthreads();
    for (int w = 0; w < BLOCK / WARP; ++w)
        if (found[w] != first) return found[w];
    return first;
}

// Units of a thread in a tile.
template <class T>
constexpr int UNITS = TILE / (BLOCK * Unit<T>::SIZE);

// A bit for each element of a thread.
template <class T>
using Marks = unsigned[UNITS<T> * Unit<T>::SIZE / 32];

// Mark a thread's elements of a tile that differ from `first`. Returns one of them, or `first`. WHOLE: the tile has all
// its elements, at an aligned address. Its loads depend on nothing, so that many are on their way at a time.
template <bool WHOLE, class T, class Bits>
__device__ __forceinline__ Bits mark(const T* x, int count, Bits first, Marks<T>& differ) {
    constexpr int SIZE = Unit<T>::SIZE, BATCH = WHOLE ? HELD : 1;
    const bool wide = WHOLE || aligned(x);
    Bits other = first;
#pragma unroll
    for (int batch = 0; batch < UNITS<T>; batch += BATCH) {
        Unit<T> held[BATCH];
        int exist[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int element = ((batch + k) * BLOCK + (int)threadIdx.x) * SIZE;
            exist[k] = WHOLE ? SIZE : filled<T>(count - element);
            held[k] = load_unit(x + element, exist[k], wide);
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
#pragma unroll
            for (int e = 0; e < SIZE; ++e)
                if (held[k].at(e).bits != first && e < exist[k]) {
                    differ[(batch + k) * SIZE / 32] |= 1u << ((batch + k) * SIZE + e) % 32;
                    other = held[k].at(e).bits;
                }
    }
    return other;
}

// Signed patterns are compared, but for bytes. `values`: the lesser and the greater pattern of each tile.
template <class T>
__device__ __forceinline__ void compress(const T* x, unsigned char* bits, T* values, long long numel) {
    constexpr int SIZE = Unit<T>::SIZE, LANES = 32 / SIZE;
    const long long start = (long long)blockIdx.x * TILE;
    const int count = (int)min((long long)TILE, numel - start);
    x += start;
    const auto first = x[0].bits;
    const bool whole = count == TILE && aligned(x);
    Marks<T> differ = {};
    auto other = whole ? mark<true>(x, count, first, differ) : mark<false>(x, count, first, differ);
    other = find_other(other, first);
    if (threadIdx.x == 0) {
        values[2 * blockIdx.x].bits = first < other ? first : other;
        values[2 * blockIdx.x + 1].bits = first < other ? other : first;
    }
#pragma unroll
    for (int k = 0; k < UNITS<T>; ++k) {
        const int left = count - (k * BLOCK + (int)threadIdx.x) * SIZE;
        const unsigned word = gather<SIZE>(differ[k * SIZE / 32] >> k * SIZE % 32 & ALL_LANES >> (32 - SIZE));
        if (threadIdx.x % LANES == 0 && left > 0) {
            const unsigned exist = left >= 32 ? ALL_LANES : (1u << left) - 1;
            store_word(bits + (start + count - left) / 8, (first < other ? word : ~word) & exist, left);
        }
    }
}

template <class T>
__device__ __forceinline__ void decompress(const unsigned char* bits, const T* values, T* x, long long numel) {
    constexpr int SIZE = Unit<T>::SIZE;
    static_assert(TILE % (HELD * BLOCK * SIZE) == 0, "a block's elements are of one tile");
    values += (long long)blockIdx.x * (HELD * BLOCK * SIZE) / TILE * 2;
    const T low = values[0], high = values[1];
    const bool wide = aligned(x);
    const long long tile = ((long long)blockIdx.x * HELD * BLOCK + threadIdx.x) * SIZE;
    unsigned held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const long long element = tile + (long long)k * BLOCK * SIZE;
        held[k] = element < numel ? bits[element / 8] >> element % 8 : 0;
        if (SIZE > 8 && element + 8 < numel) held[k] |= (unsigned)bits[element / 8 + 1] << 8;
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const long long element = tile + (long long)k * BLOCK * SIZE;
        Unit<T> unit = {};
#pragma unroll
        for (int e = 0; e < SIZE; ++e) unit.put(e, held[k] >> e & 1 ? high : low);
        store_unit(x + element, unit, filled<T>(numel - element), wide);
    }
}

// Four blocks share a multiprocessor, so that some load while others store.
#define KERNELS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK, 4) bits_compress##SUFFIX(                                      \
        const T* x, unsigned char* bits, T* values, long long numel) {                                                 \
        compress(x, bits, values, numel);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK) bits_decompress##SUFFIX(                                       \
        const unsigned char* bits, const T* values, T* x, long long numel) {                                           \
        decompress(bits, values, x, numel);                                                                            \
    }

KERNELS(_1, Pattern<unsigned char>)
KERNELS(_2, Pattern<short>)
KERNELS(_4, Pattern<int>)
KERNELS(_8, Pattern<long long>)
