#pragma once

__device__ __forceinline__ float halved(float x) { return __fmul_rn(x, 0.5f); }
