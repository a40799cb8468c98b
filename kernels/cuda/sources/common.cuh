// What the kernels share: dtypes, words of elements, codes, quantizers, random numbers.
#pragma once

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// ---- dtypes ----

template <class Bits>
struct Pattern {
    Bits bits;
};
// KIND tells them apart. INFINITIES: a word of them.
struct Float : Pattern<unsigned> {
    static constexpr int KIND = 0;
    static constexpr unsigned INFINITIES = 0x7f800000u, SIGNS = 0x80000000u;
};
struct Half : Pattern<unsigned short> {
    static constexpr int KIND = 1;
    static constexpr unsigned INFINITIES = 0x7c007c00u, SIGNS = 0x80008000u;
};
struct Bfloat16 : Pattern<unsigned short> {
    static constexpr int KIND = 2;
    static constexpr unsigned INFINITIES = 0x7f807f80u, SIGNS = 0x80008000u;
};

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

__device__ __forceinline__ bool aligned(const void* pointer) { return ((unsigned long long)pointer & 15) == 0; }

// n / divisor for unsigned integers, where `reciprocal` is the greatest one of their type / divisor, rounded down. The
// upper half of the product is right, or one too small.
__device__ __forceinline__ unsigned divide(unsigned n, unsigned divisor, unsigned reciprocal) {
    const unsigned quotient = __umulhi(n, reciprocal);
    return n - quotient * divisor >= divisor ? quotient + 1 : quotient;
}
__device__ __forceinline__ unsigned long long divide(
    unsigned long long n, unsigned long long divisor, unsigned long long reciprocal) {
    const unsigned long long quotient = __umul64hi(n, reciprocal);
    return n - quotient * divisor >= divisor ? quotient + 1 : quotient;
}

// ---- words: one float, or two 16-bit numbers, the first in the lower half ----
//
// From sm_80 on, instructions compare and round a word of two at once. Elsewhere, the emulator included, other ones
// give the same bits.

template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

template <class T>
__device__ __forceinline__ float number(unsigned word, int k) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word);
    else {
        T x;
        x.bits = (unsigned short)(word >> 16 * k);
        return to_float(x);
    }
}

template <class T>
__device__ __forceinline__ unsigned word_of(const float (&numbers)[PER_WORD<T>]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned word = __float_as_uint(numbers[0]);
    if constexpr (T::KIND == 1)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(numbers[1]), "f"(numbers[0]));
    else if constexpr (T::KIND == 2)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(numbers[1]), "f"(numbers[0]));
    return word;
#else
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < PER_WORD<T>; ++k) {
        T x;
        from_float(numbers[k], x);
        word |= (unsigned)x.bits << 16 * k;
    }
    return word;
#endif
}

// The greater and the lesser of two numbers, element by element; NaN if one of them is.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define EXTREME(NAME, INSTRUCTION, FLOAT_FUNCTION)                                                                     \
    template <class T>                                                                                                 \
    __device__ __forceinline__ unsigned NAME(unsigned a, unsigned b) {                                                 \
        unsigned word;                                                                                                 \
        if constexpr (T::KIND == 0) asm(INSTRUCTION ".NaN.f32 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));             \
        else if constexpr (T::KIND == 1) asm(INSTRUCTION ".NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));      \
        else asm(INSTRUCTION ".NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));                                 \
        return word;                                                                                                   \
    }
#else
#define EXTREME(NAME, INSTRUCTION, FLOAT_FUNCTION)                                                                     \
    template <class T>                                                                                                 \
    __device__ __forceinline__ unsigned NAME(unsigned a, unsigned b) {                                                 \
        float chosen[PER_WORD<T>];                                                                                     \
        for (int k = 0; k < PER_WORD<T>; ++k) {                                                                        \
            const float x = number<T>(a, k), y = number<T>(b, k);                                                      \
            chosen[k] = x != x ? x : y != y ? y : FLOAT_FUNCTION(x, y);                                                \
        }                                                                                                              \
        return word_of<T>(chosen);                                                                                     \
    }
#endif
EXTREME(greater, "max", fmaxf)
EXTREME(lesser, "min", fminf)

// The greatest and the least of some numbers, for each element of a word; NaN if there is one.
template <class T>
struct Range {
    unsigned high = T::INFINITIES | T::SIGNS, low = T::INFINITIES;

    __device__ __forceinline__ void include(unsigned word) { merge(word, word); }

    __device__ __forceinline__ void include_one(T x) {
        include(PER_WORD<T> == 2 ? (unsigned)x.bits << 16 | x.bits : (unsigned)x.bits);
    }

    __device__ __forceinline__ void merge(unsigned other_high, unsigned other_low) {
        high = greater<T>(high, other_high);
        low = lesser<T>(low, other_low);
    }

    // Let all elements of the words be what is the greatest and the least of them.
    __device__ __forceinline__ void fold() {
        if constexpr (PER_WORD<T> == 2) merge(high >> 16 | high << 16, low >> 16 | low << 16);
    }
};

// COUNT neighbours in memory, at an aligned address.
template <class T, int COUNT>
struct Chunk {
    static constexpr int WORDS = COUNT / PER_WORD<T>;
    unsigned words[WORDS];

    __device__ __forceinline__ float at(int k) const { return number<T>(words[k / PER_WORD<T>], k % PER_WORD<T>); }

    __device__ __forceinline__ void load(const void* x) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
            const uint4 four = reinterpret_cast<const uint4*>(x)[w / 4];
            words[w] = four.x;
            words[w + 1] = four.y;
            words[w + 2] = four.z;
            words[w + 3] = four.w;
        }
    }

    __device__ __forceinline__ void store(void* x) const {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4)
            reinterpret_cast<uint4*>(x)[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
};

// ---- codes: integers of 4 or 8 bits from -HALF to HALF - 1, stored plus HALF, the first in the lowest bits ----

template <int BITS>
constexpr int HALF = 1 << (BITS - 1);
template <int BITS>
constexpr unsigned PER_BYTE = 8 / BITS;
template <int BITS>
constexpr unsigned MASK = (1u << BITS) - 1;

// The codes of COUNT neighbours, at an address that is a multiple of their size.
template <int BITS, int COUNT>
struct Codes {
    static constexpr int BYTES = COUNT * BITS / 8, WORDS = (BYTES + 3) / 4, PER_WORD = 32 / BITS;
    unsigned words[WORDS];

    // The k-th code as a float. With the exponent of 2^(23 - shift), the last place of what is stored has the value 1.
    __device__ __forceinline__ float at(int k) const {
        const int shift = k * BITS % 16;
        const unsigned half = words[k / PER_WORD] >> k * BITS % 32 / 16 * 16;
        const float sum = __uint_as_float((150u - shift) << 23 | (half & MASK<BITS> << shift));
        return __fsub_rn(sum, (float)((1 << (23 - shift)) + HALF<BITS>));
    }

    __device__ __forceinline__ void load(const unsigned char* bytes) {
        if constexpr (BYTES == 2) words[0] = *reinterpret_cast<const unsigned short*>(bytes);
        else if constexpr (BYTES == 4) words[0] = *reinterpret_cast<const unsigned*>(bytes);
        else if constexpr (BYTES == 8) {
            const uint2 two = *reinterpret_cast<const uint2*>(bytes);
            words[0] = two.x;
            words[1] = two.y;
        } else {
            const uint4 four = *reinterpret_cast<const uint4*>(bytes);
            words[0] = four.x;
            words[1] = four.y;
            words[2] = four.z;
            words[3] = four.w;
        }
    }

    __device__ __forceinline__ void store(unsigned char* bytes) const {
        if constexpr (BYTES == 2) *reinterpret_cast<unsigned short*>(bytes) = (unsigned short)words[0];
        else if constexpr (BYTES == 4) *reinterpret_cast<unsigned*>(bytes) = words[0];
        else if constexpr (BYTES == 8) *reinterpret_cast<uint2*>(bytes) = make_uint2(words[0], words[1]);
        else *reinterpret_cast<uint4*>(bytes) = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// Adding 1.5 * 2^23 + HALF rounds to the nearest, halves to even: ROUNDED + what is stored.
constexpr unsigned ROUNDED = 0x4b400000u;
template <int BITS>
__device__ __forceinline__ unsigned rounded(float clipped) {
    return __float_as_uint(__fadd_rn(clipped, 12582912.0f + HALF<BITS>));
}

// ---- quantizers ----

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
    static constexpr bool OFFSET = false;

    static __device__ __forceinline__ Parameters fit(float high, float low, bool paper) {
        const float extreme = high > -low ? high : low;
        const float scale = normal(__fmul_rn(paper ? fabsf(extreme) : -extreme, 1.0f / HALF<N>));
        return {scale, 0.0f, reciprocal(scale)};
    }

    static __device__ __forceinline__ float scaled(float x, const Parameters& p) { return __fmul_rn(x, p.inverse); }

    // Nothing is below -HALF by more than a rounding error, which `rounded` rounds away.
    static __device__ __forceinline__ float clipped(float value) { return fminf(value, HALF<N> - 1.0f); }

    static __device__ __forceinline__ float restored(float code, const Parameters& p) {
        return __fmul_rn(code, p.scale);
    }
};

template <int N>
struct Asymmetric {
    static constexpr int BITS = N;
    static constexpr bool OFFSET = true;
    // 2 / 15 and 2 / 255, rounded down.
    static constexpr float STEP = N == 4 ? 0.13333332538604736f : 0.00784313678741455f;
    static constexpr float LARGEST_SCALE = GREATEST / HALF<N>;

    static __device__ __forceinline__ Parameters fit(float high, float low, bool) {
        const float wanted = __fmul_rn(__fsub_rn(__fmul_rn(high, 0.5f), __fmul_rn(low, 0.5f)), STEP);
        const float scale = normal(wanted > LARGEST_SCALE && wanted <= GREATEST ? LARGEST_SCALE : wanted);
        return {scale, __fadd_rn(low, __fmul_rn((float)HALF<N>, scale)), reciprocal(scale)};
    }

    static __device__ __forceinline__ float scaled(float x, const Parameters& p) {
        return __fmul_rn(__fsub_rn(x, p.offset), p.inverse);
    }

    static __device__ __forceinline__ float clipped(float value) { return clip<N>(value); }

    static __device__ __forceinline__ float restored(float code, const Parameters& p) {
        return __fadd_rn(__fmul_rn(code, p.scale), p.offset);
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

// The code of a value, rounded down, or up with the probability of its fraction. `word`: the element's random number.
template <int BITS>
__device__ __forceinline__ float randomly_rounded(float value, unsigned word) {
    const float uniform = __fmul_rn((float)(word >> 8), 5.9604644775390625e-8f), floor = floorf(value);  // 2^-24
    return clip<BITS>(uniform < __fsub_rn(value, floor) ? __fadd_rn(floor, 1.0f) : floor);
}

// ---- from elements to codes and back ----
//
// `of(k)`: the Parameters of the k-th element's group. `first`: the flat index of the first element, a multiple of 4.

template <class Q, bool STOCHASTIC, class T, int COUNT, class Of>
__device__ __forceinline__ Codes<Q::BITS, COUNT> encode(
    const Chunk<T, COUNT>& chunk, Of of, long long first, long long seed) {
    constexpr int BITS = Q::BITS, EACH = Codes<BITS, COUNT>::PER_WORD, IN_WORD = COUNT < EACH ? COUNT : EACH;
    Codes<BITS, COUNT> codes;
    unsigned random[4];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float value = Q::scaled(chunk.at(k), of(k));
        if (STOCHASTIC && k % 4 == 0) philox((first + k) / 4, seed, random);
        const float code = STOCHASTIC ? randomly_rounded<BITS>(value, random[k % 4]) : Q::clipped(value);
        const unsigned one = rounded<BITS>(code);
        // The sum of the codes, each in its place, and of ROUNDED as often, which is known.
        constexpr unsigned PLACES = (ALL_LANES >> (32 - BITS * IN_WORD)) / MASK<BITS>;
        unsigned& word = codes.words[k / EACH];
        word = k % EACH ? word + (one << BITS * (k % EACH)) : one - ROUNDED * PLACES;
    }
    return codes;
}

template <class Q, class T, int COUNT, class Of>
__device__ __forceinline__ Chunk<T, COUNT> decode(const Codes<Q::BITS, COUNT>& codes, Of of) {
    Chunk<T, COUNT> chunk;
#pragma unroll
    for (int w = 0; w < Chunk<T, COUNT>::WORDS; ++w) {
        float numbers[PER_WORD<T>];
#pragma unroll
        for (int k = 0; k < PER_WORD<T>; ++k) {
            const int at = w * PER_WORD<T> + k;
            numbers[k] = Q::restored(codes.at(at), of(at));
        }
        chunk.words[w] = word_of<T>(numbers);
    }
    return chunk;
}

// The slow way, for tensors of any address: write the codes of the elements `at` and `at + 1`, of which the second may
// not exist, to the block's `codes`. A code missing in the last byte is stored as 0. `first`: the flat index of the
// first of them, which is even.
template <class Q, bool STOCHASTIC>
__device__ __forceinline__ void store_pair(
    unsigned char* codes, const float (&x)[2], const Parameters (&p)[2], long long at, bool both, long long first,
    long long seed) {
    constexpr int BITS = Q::BITS;
    unsigned random[4] = {}, stored[2];
    if (STOCHASTIC) philox(first / 4, seed, random);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float value = Q::scaled(x[k], p[k]);
        const unsigned word = first & 2 ? random[k + 2] : random[k];
        stored[k] = rounded<BITS>(STOCHASTIC ? randomly_rounded<BITS>(value, word) : Q::clipped(value)) & MASK<BITS>;
    }
    if (BITS == 4) codes[at / 2] = (unsigned char)(both ? stored[0] | stored[1] << 4 : stored[0]);
    else {
        codes[at] = (unsigned char)stored[0];
        if (both) codes[at + 1] = (unsigned char)stored[1];
    }
}

template <class Q>
__device__ __forceinline__ float restore(const unsigned char* codes, long long at, const Parameters& p) {
    const unsigned stored = Q::BITS == 4 ? codes[at / 2] >> 4 * (at & 1) & 15u : codes[at];
    return Q::restored((float)((int)stored - HALF<Q::BITS>), p);
}

// KERNELS(WIDTH, BITS, SUFFIX, T) for codes of 4 and of 8 BITS. Names of kernels have the WIDTH in them if it is 8.
#define FOR_EACH_WIDTH(KERNELS)                                                                                        \
    KERNELS(, 4, _f32, Float)                                                                                          \
    KERNELS(, 4, _f16, Half)                                                                                           \
    KERNELS(, 4, _bf16, Bfloat16)                                                                                      \
    KERNELS(8, 8, _f32, Float)                                                                                         \
    KERNELS(8, 8, _f16, Half)                                                                                          \
    KERNELS(8, 8, _bf16, Bfloat16)
