// Which of the compiled instruction sets this machine can run, and the replay of recorded calls. Compiled for the
// oldest instruction set.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) const char *isthmus_sources() {
    return ISTHMUS_SOURCES;
}

extern "C" __attribute__((visibility("default"))) int64_t isthmus_cpu_level() {
#if ISTHMUS_LEVELS > 1
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512cd");
    return avx2 ? (avx512 ? 2 : 1) : 0;
#else
    return 0;
#endif
}

// Whether it multiplies pairs of bf16 as well (AVX512-BF16), in the form of the widest instruction set.
extern "C" __attribute__((visibility("default"))) int64_t isthmus_cpu_bf16() {
#if ISTHMUS_LEVELS > 1
    return isthmus_cpu_level() == 2 && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

// Whether that is the fastest way, too. Intel's cores begin such a dot product in every second cycle and two multiply-adds of
// fp32 in each (measured on Golden Cove, which AVX512-FP16 tells): half of the pairs, for what it costs to widen the weights.
extern "C" __attribute__((visibility("default"))) int64_t isthmus_cpu_pairs() {
#if ISTHMUS_LEVELS > 1 && __GNUC__ < 12  // which does not know the name
    return isthmus_cpu_bf16();
#elif ISTHMUS_LEVELS > 1
    return isthmus_cpu_bf16() && !(__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16"));
#else
    return 0;
#endif
}

// Run a recorded program; the first failing call ends it. Returns its code, and its index in `failed`.
extern "C" __attribute__((visibility("default"))) int isthmus_run(int64_t (*const *functions)(const uint64_t *),
                                                                  const uint64_t *const *arguments, int64_t count,
                                                                  int64_t *failed) {
    for (int64_t i = 0; i < count; i++)
        if (const int64_t code = functions[i](arguments[i])) {
            *failed = i;
            return int(code);
        }
    return 0;
}
