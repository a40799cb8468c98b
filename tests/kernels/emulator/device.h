// The CUDA C++ that the kernels are written in, for g++: included ahead of a .cu file, which stays as it is. What no
// kernel uses is not here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Thread-local, so that a module's shared variables, and nothing else, are its thread-local block.
#define __shared__ static thread_local

#define threadIdx emulator::thread_index()
#define blockIdx emulator::block_index()
#define blockDim emulator::block_size()

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Bits and numbers. One rounding an operation: the compiler is told not to contract.

template <class To, class From> inline To emulated_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emulated_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_cast<float>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __ffs(int x) { return __builtin_ffs(x); }

// As PTX has them: the number, where the other is NaN; -0.0 is less than 0.0.
inline float emulated_fminf(float a, float b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float emulated_fmaxf(float a, float b) {
    if (a != a || b != b) return a != a ? b : a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
#define fminf emulated_fminf
#define fmaxf emulated_fmaxf
inline int min(int a, int b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

inline float half_to_float(unsigned short half) {
    unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

// To the nearest, halves to even; every NaN becomes 0x7fff, as in hardware.
inline unsigned short float_to_half(float x) {
    unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
    float magnitude = std::fabs(x);
    if (x != x) return 0x7fff;
    if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f)  // adding 0.5 leaves multiples of 2^-24, a half's smallest step, in the last bits
        return static_cast<unsigned short>(sign | (__float_as_uint(magnitude + 0.5f) - 0x3f000000u));
    unsigned bits = __float_as_uint(magnitude);
    return static_cast<unsigned short>(sign | (((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - (112u << 10)));
}

// Barriers and warps.

inline void __syncthreads() { emulator::block_barrier(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emulator::ballot(mask, predicate); }
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int other) {
    return emulator::shuffle_xor(mask, value, other);
}
