// Which of the compiled instruction sets this machine can run. Compiled for the oldest one.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int64_t isthmus_cpu_level() {
#if ISTHMUS_LEVELS > 1
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512cd");
    return avx2 ? (avx512 ? 2 : 1) : 0;
#else
    return 0;
#endif
}
