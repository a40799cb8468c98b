#include "common.cuh"

extern "C" __global__ void copy_f32(const float* x, float* y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

extern "C" __global__ void copy_vectors(const float* x, float* y, long long n) {
    long long i = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) *(float4*)(y + i) = *(const float4*)(x + i);
}

extern "C" __global__ void write_past_the_end(float* y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = 1.0f;
}

extern "C" __global__ void read_before_the_start(const float* x, float* y, long long n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[(long long)threadIdx.x - 1];
}

extern "C" __global__ void __launch_bounds__(128) reverse_block(const float* x, float* y, long long barrier) {
    __shared__ float values[128];
    values[threadIdx.x] = x[threadIdx.x];
    if (barrier) __syncthreads();
    y[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void read_shared_uninitialised(float* y) {
    __shared__ float values[64];
    if (threadIdx.x != 5) values[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = halved(values[threadIdx.x]);
}

extern "C" __global__ void overrun_shared(float* y) {
    __shared__ float values[32];
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = values[threadIdx.x + 1];
}

extern "C" __global__ void overrun_shared_by_pointer(float* y, long long i) {
    __shared__ float values[32];
    const float* end = values + 32;
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = threadIdx.x == 31 ? end[i] : values[threadIdx.x];
}

extern "C" __global__ void shuffle_in_a_branch(int* y) {
    int value = threadIdx.x;
    if (threadIdx.x < 20) value = __shfl_xor_sync(0xffffffffu, value, 1);
    y[threadIdx.x] = value;
}

extern "C" __global__ void two_intrinsics_at_once(int* y) {
    int value = threadIdx.x;
    if (threadIdx.x < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
    else value = __ballot_sync(0xffffffffu, value);
    y[threadIdx.x] = value;
}

extern "C" __global__ void barrier_in_a_branch(int* y) {
    if (threadIdx.x != 40) __syncthreads();
    y[threadIdx.x] = 1;
}

extern "C" __global__ void share_a_byte(unsigned char* y) {
    unsigned char* byte = y + threadIdx.x / 2;
    if (threadIdx.x % 2) *byte = (unsigned char)(threadIdx.x << 4);
    else *byte = (unsigned char)threadIdx.x;
}

extern "C" __global__ void share_between_blocks(int* y) {
    if (threadIdx.x == 0) y[0] = (int)blockIdx.x;
}

extern "C" __global__ void overflow(int* y, long long n) {
    int value = 0x7fffffff;
    y[threadIdx.x] = value + (int)n;
}

extern "C" __global__ void warp_functions(const int* x, int* y) {
    int lane = threadIdx.x, value = x[lane];
    y[lane] = __shfl_xor_sync(0xffffffffu, value, 5);
    y[32 + lane] = (int)__ballot_sync(0xffffffffu, value % 3 == 0);
}

extern "C" __global__ void from_half(const unsigned short* x, float* y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = half_to_float(x[i]);
}

extern "C" __global__ void to_half(const float* x, unsigned short* y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = float_to_half(x[i]);
}

extern "C" __global__ void extremes(const float* x, float* y) {
    y[threadIdx.x] = fminf(x[threadIdx.x], x[threadIdx.x + 32]);
    y[threadIdx.x + 32] = fmaxf(x[threadIdx.x], x[threadIdx.x + 32]);
}
