// What the kernels share: dtypes, 16-byte units, quantizers, random numbers.
#pragma once

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// ---- dtypes ----

template <class Bits>
struct Pattern {
    Bits bits;
};
struct Float : Pattern<unsigned> {};
struct Half : Pattern<unsigned short> {};
struct Bfloat16 : Pattern<unsigned short> {};

#ifndef DS_ADACC_EMULATED
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ float to_float(Float x) { return __uint_as_float(x.bits); }
__device__ __forceinline__ float to_float(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(Bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ void from_float(float value, Float& x) { x.bits = __float_as_uint(value); }
__device__ __forceinline__ void from_float(float value, Half& x) { x.bits = float_to_half(value); }
__device__ __forceinline__ void from_float(float value, Bfloat16& x) {
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    x.bits = (unsigned short)(value == value ? rounded >> 16 : 0x7fc0u);
}

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

__device__ __forceinline__ bool aligned(const void* pointer) { return ((unsigned long long)pointer & 15) == 0; }

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

// ---- codes: integers of 4 or 8 bits from -HALF to HALF - 1, stored plus HALF ----

template <int BITS>
constexpr int HALF = 1 << (BITS - 1);
template <int BITS>
constexpr int PER_BYTE = 8 / BITS;

template <int BYTES>
struct Word {
    using Type = unsigned;
};
template <>
struct Word<8> {
    using Type = unsigned long long;
};

// The codes of a unit, the first in the lowest bits.
template <int BITS, class T>
using Codes = typename Word<Unit<T>::SIZE / PER_BYTE<BITS>>::Type;

template <int BITS, class T>
__device__ __forceinline__ Codes<BITS, T> load_codes(const unsigned char* bytes, int count, bool wide) {
    if (wide && count == Unit<T>::SIZE) {
        if constexpr (Unit<T>::SIZE / PER_BYTE<BITS> == 2) return *reinterpret_cast<const unsigned short*>(bytes);
        else return *reinterpret_cast<const Codes<BITS, T>*>(bytes);
    }
    Codes<BITS, T> codes = 0;
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; k += PER_BYTE<BITS>)
        if (k < count) codes |= (Codes<BITS, T>)bytes[k / PER_BYTE<BITS>] << BITS * k;
    return codes;
}

// A code missing in the last byte, after an odd `count`, is stored as 0.
template <int BITS, class T>
__device__ __forceinline__ void store_codes(unsigned char* bytes, Codes<BITS, T> codes, int count, bool wide) {
    if (wide && count == Unit<T>::SIZE) {
        if constexpr (Unit<T>::SIZE / PER_BYTE<BITS> == 2)
            *reinterpret_cast<unsigned short*>(bytes) = (unsigned short)codes;
        else *reinterpret_cast<Codes<BITS, T>*>(bytes) = codes;
        return;
    }
    if constexpr (PER_BYTE<BITS> > 1)
        if (count % PER_BYTE<BITS>) codes &= (1u << BITS * count) - 1;
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; k += PER_BYTE<BITS>)
        if (k < count) bytes[k / PER_BYTE<BITS>] = (unsigned char)(codes >> BITS * k);
}

// Adding 1.5 * 2^23 + HALF rounds to the nearest, halves to even, and leaves what is stored in the lowest bits.
template <int BITS>
__device__ __forceinline__ unsigned stored_code(float clipped) {
    return __float_as_uint(__fadd_rn(clipped, 12582912.0f + HALF<BITS>)) & ((1u << BITS) - 1);
}

// The lowest bits as a code: 2^23 + what is stored, exactly, less 2^23 + HALF.
template <int BITS>
__device__ __forceinline__ float code_of(unsigned stored) {
    return __fsub_rn(__uint_as_float(0x4b000000u | (stored & ((1u << BITS) - 1))), 8388608.0f + HALF<BITS>);
}

// ---- quantizers ----
//
// The range of a group is held in words that are merged by taking the greatest, in any order. NaN and Inf come out on
// top, as their bit patterns are the greatest, so that the group's parameters tell of them.

constexpr float SMALLEST_SCALE = 1.17549435e-38f;
constexpr float GREATEST = 3.402823466e+38f;

template <int BITS>
__device__ __forceinline__ float clip(float value) {
    return fminf(fmaxf(value, (float)-HALF<BITS>), HALF<BITS> - 1.0f);
}

struct Parameters {
    float scale, offset, inverse;
};

__device__ __forceinline__ float normal(float scale) { return fabsf(scale) < SMALLEST_SCALE ? 0.0f : scale; }

__device__ __forceinline__ float reciprocal(float scale) {
    const float inverse = __frcp_rn(scale);
    return fabsf(inverse) <= GREATEST ? inverse : 0.0f;
}

template <int N>
struct Symmetric {
    static constexpr int BITS = N;
    static constexpr float STEP = 1.0f / HALF<N>;
    static constexpr int WORDS = 1;
    static constexpr bool ZERO_IS_IN_RANGE = true;
    static constexpr bool OFFSET = false;

    // Magnitude above, sign below: of two extremes of one magnitude, the negative is the greater.
    static __device__ __forceinline__ void include(unsigned (&range)[WORDS], float x) {
        const unsigned bits = __float_as_uint(x);
        range[0] = max(range[0], bits << 1 | bits >> 31);
    }

    static __device__ __forceinline__ Parameters fit(const unsigned (&range)[WORDS], bool paper) {
        const float extreme = __uint_as_float(range[0] >> 1 | range[0] << 31);
        const float scale = normal(paper ? fabsf(extreme) * STEP : extreme * -STEP);
        return {scale, 0.0f, reciprocal(scale)};
    }

    static __device__ __forceinline__ float scaled(float x, const Parameters& p) { return __fmul_rn(x, p.inverse); }

    // Nothing is below -HALF by more than a rounding error, which `stored_code` rounds away.
    static __device__ __forceinline__ float clipped(float value) { return fminf(value, HALF<N> - 1.0f); }

    static __device__ __forceinline__ float restored(unsigned stored, const Parameters& p) {
        return __fmul_rn(code_of<N>(stored), p.scale);
    }
};

template <int N>
struct Asymmetric {
    static constexpr int BITS = N;
    // 2 / 15 and 2 / 255, rounded down.
    static constexpr float STEP = N == 4 ? 0.13333332538604736f : 0.00784313678741455f;
    static constexpr float LARGEST_SCALE = GREATEST / HALF<N>;
    static constexpr int WORDS = 2;
    static constexpr bool ZERO_IS_IN_RANGE = false;
    static constexpr bool OFFSET = true;

    // Unsigned integers in the order of the floats; those of the least are complemented to be the greatest.
    static __device__ __forceinline__ void include(unsigned (&range)[WORDS], float x) {
        const unsigned bits = __float_as_uint(x);
        const unsigned rank = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
        range[0] = max(range[0], rank);
        range[1] = max(range[1], ~rank);
    }

    static __device__ __forceinline__ float ranked(unsigned rank) {
        return __uint_as_float(rank ^ (rank >> 31 ? 0x80000000u : 0xffffffffu));
    }

    static __device__ __forceinline__ Parameters fit(const unsigned (&range)[WORDS], bool) {
        const float high = ranked(range[0]), low = ranked(~range[1]);
        const float wanted = __fmul_rn(__fsub_rn(__fmul_rn(high, 0.5f), __fmul_rn(low, 0.5f)), STEP);
        const float scale = normal(wanted > LARGEST_SCALE && wanted <= GREATEST ? LARGEST_SCALE : wanted);
        return {scale, __fadd_rn(low, __fmul_rn((float)HALF<N>, scale)), reciprocal(scale)};
    }

    static __device__ __forceinline__ float scaled(float x, const Parameters& p) {
        return __fmul_rn(__fsub_rn(x, p.offset), p.inverse);
    }

    static __device__ __forceinline__ float clipped(float value) { return clip<N>(value); }

    static __device__ __forceinline__ float restored(unsigned stored, const Parameters& p) {
        return __fadd_rn(__fmul_rn(code_of<N>(stored), p.scale), p.offset);
    }
};

// ---- random numbers ----

// Philox4x32-10 with the counter `call` and the key `seed` (Salmon et al., SC 2011).
__device__ __forceinline__ void philox(unsigned long long call, unsigned long long seed, unsigned* words) {
    unsigned a = (unsigned)call, b = (unsigned)(call >> 32), c = 0, d = 0;
    unsigned low = (unsigned)seed, high = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned first_high = __umulhi(0xd2511f53u, a), first_low = 0xd2511f53u * a;
        const unsigned second_high = __umulhi(0xcd9e8d57u, c), second_low = 0xcd9e8d57u * c;
        a = second_high ^ b ^ low;
        b = second_low;
        c = first_high ^ d ^ high;
        d = first_low;
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

// Widen the range to hold the first `count` elements of a unit, whose other elements are zero.
template <class Q, class T>
__device__ __forceinline__ void include(unsigned (&range)[Q::WORDS], const Unit<T>& unit, int count) {
    const bool all = Q::ZERO_IS_IN_RANGE || count == Unit<T>::SIZE;
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; ++k)
        if (all || k < count) Q::include(range, to_float(unit.at(k)));
}

// The codes of a unit whose first element has the flat index `first`, which is even. `of(k)`: the Parameters of the
// k-th element's group.
template <class Q, bool STOCHASTIC, class T, class Of>
__device__ __forceinline__ Codes<Q::BITS, T> encode(const Unit<T>& unit, Of of, long long first, long long seed) {
    constexpr int SIZE = Unit<T>::SIZE, BITS = Q::BITS;
    Codes<BITS, T> codes = 0;
    if constexpr (STOCHASTIC) {
        unsigned words[SIZE + 4];  // a unit may begin in the middle of a call's four numbers
#pragma unroll
        for (int k = 0; k < SIZE + 4; k += 4)
            if (k < SIZE || first & 2) philox((first + k) / 4, seed, words + k);
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            const unsigned word = first & 2 ? words[k + 2] : words[k];
            const float uniform = __fmul_rn((float)(word >> 8), 5.9604644775390625e-8f);  // 2^-24
            const float value = Q::scaled(to_float(unit.at(k)), of(k)), floor = floorf(value);
            const float chosen = uniform < __fsub_rn(value, floor) ? __fadd_rn(floor, 1.0f) : floor;
            codes |= (Codes<BITS, T>)stored_code<BITS>(clip<BITS>(chosen)) << BITS * k;
        }
    } else {
#pragma unroll
        for (int k = 0; k < SIZE; ++k)
            codes |= (Codes<BITS, T>)stored_code<BITS>(Q::clipped(Q::scaled(to_float(unit.at(k)), of(k)))) << BITS * k;
    }
    return codes;
}

template <class Q, class T, class Of>
__device__ __forceinline__ Unit<T> decode(Codes<Q::BITS, T> codes, Of of) {
    Unit<T> unit = {};
#pragma unroll
    for (int k = 0; k < Unit<T>::SIZE; ++k) {
        T x;
        from_float(Q::restored((unsigned)(codes >> Q::BITS * k), of(k)), x);
        unit.put(k, x);
    }
    return unit;
}
