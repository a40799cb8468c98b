// The CUDA C++ that the kernels are written in, for g++: included ahead of a .cu file, which stays as it is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __constant__ static const
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Thread-local, so that a module's shared variables, and nothing else, are its thread-local block.
#define __shared__ static thread_local

#define threadIdx emulator::thread_index()
#define blockIdx emulator::block_index()
#define blockDim emulator::block_size()
#define gridDim emulator::grid_size()
constexpr int warpSize = 32;

#define VECTORS(SCALAR, NAME, PAIR_ALIGNMENT, QUAD_ALIGNMENT)                                                       \
    struct alignas(PAIR_ALIGNMENT) NAME##2 { SCALAR x, y; };                                                        \
    struct alignas(QUAD_ALIGNMENT) NAME##4 { SCALAR x, y, z, w; };                                                  \
    inline NAME##2 make_##NAME##2(SCALAR x, SCALAR y) { return {x, y}; }                                            \
    inline NAME##4 make_##NAME##4(SCALAR x, SCALAR y, SCALAR z, SCALAR w) { return {x, y, z, w}; }
VECTORS(unsigned char, uchar, 2, 4)
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned, uint, 8, 16)
VECTORS(float, float, 8, 16)
#undef VECTORS
struct alignas(16) double2 { double x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// Bits and numbers. One rounding an operation: the compiler is told not to contract.

template <class To, class From> inline To emulated_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emulated_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emulated_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return emulated_cast<float>(x); }
inline float __int_as_float(int x) { return emulated_cast<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_cast<double>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }

// To the nearest integer, halves to even; out of range saturates, NaN is zero.
inline int __float2int_rn(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : int(std::nearbyint(x));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }

// As PTX has them: the number, where the other is NaN; -0.0 is less than 0.0.
template <class T> inline T emulated_min(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T> inline T emulated_max(T a, T b) {
    if (a != a || b != b) return a != a ? b : a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float emulated_fminf(float a, float b) { return emulated_min(a, b); }
inline float emulated_fmaxf(float a, float b) { return emulated_max(a, b); }
#define fminf emulated_fminf
#define fmaxf emulated_fmaxf
inline float min(float a, float b) { return emulated_min(a, b); }
inline float max(float a, float b) { return emulated_max(a, b); }
inline double min(double a, double b) { return emulated_min(a, b); }
inline double max(double a, double b) { return emulated_max(a, b); }
#define INTEGER_MIN_MAX(T)                           \
    inline T min(T a, T b) { return a < b ? a : b; } \
    inline T max(T a, T b) { return a > b ? a : b; }
INTEGER_MIN_MAX(int)
INTEGER_MIN_MAX(unsigned)
INTEGER_MIN_MAX(long)
INTEGER_MIN_MAX(unsigned long)
INTEGER_MIN_MAX(long long)
INTEGER_MIN_MAX(unsigned long long)
#undef INTEGER_MIN_MAX

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

// Memory, barriers, warps.

template <class T> inline T __ldg(const T* address) { return *address; }

#define ATOMIC(NAME, RESULT)                                          \
    template <class T> __attribute__((no_sanitize_thread)) T NAME(T* address, T value) { \
        emulator::atomic_access(address, sizeof *address);            \
        T old = *address;                                             \
        *address = RESULT;                                            \
        return old;                                                   \
    }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicMax, max(old, value))
ATOMIC(atomicMin, min(old, value))
ATOMIC(atomicOr, old | value)
#undef ATOMIC

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::warp_barrier(mask); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emulator::ballot("__ballot_sync", mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate) { return emulator::ballot("__any_sync", mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emulator::ballot("__all_sync", mask, !predicate) == 0; }

template <class T> inline T emulated_shuffle(const char* intrinsic, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warps exchange 4 or 8 bytes");
    uint64_t given = 0;
    memcpy(&given, &value, sizeof value);
    given = emulator::shuffle(intrinsic, mask, given, source);
    memcpy(&value, &given, sizeof value);
    return value;
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned segment = emulator::lane_index() & ~(width - 1u);
    return emulated_shuffle("__shfl_sync", mask, value, segment | (unsigned(source) & (width - 1u)));
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
    unsigned lane = emulator::lane_index(), last = lane | (width - 1u), source = lane ^ unsigned(other);
    return emulated_shuffle("__shfl_xor_sync", mask, value, source <= last ? source : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
    unsigned lane = emulator::lane_index(), last = lane | (width - 1u);
    return emulated_shuffle("__shfl_down_sync", mask, value, lane + step <= last ? lane + step : lane);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
    unsigned lane = emulator::lane_index(), first = lane & ~(width - 1u);
    return emulated_shuffle("__shfl_up_sync", mask, value, lane >= first + step ? lane - step : lane);
}
