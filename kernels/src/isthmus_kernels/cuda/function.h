// How functions are declared that are compiled for the GPU and for the CPU alike, so that tests check them without a card.
#pragma once

#ifdef __CUDACC__
#define ISTHMUS_FN __host__ __device__ __forceinline__ constexpr
#else
#define ISTHMUS_FN inline constexpr
#endif
