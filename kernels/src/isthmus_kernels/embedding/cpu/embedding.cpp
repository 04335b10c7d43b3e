// Rows of a table, times a factor. Returns 1 + the index of the first id outside the table; nothing is written then.
#include "common.h"

namespace {

template <class T, class W>
void run(T *out, const W *table, const int32_t *ids, int64_t count, int64_t width, int64_t out_stride, float scale) {
    parallel_ranges(count, count * width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const W *row = table + ids[t] * width;
            T *o = out + t * out_stride;
            int64_t i = 0;
            for (; i + VW <= width; i += VW) store(o + i, load(row + i) * scale);
            for (; i < width; i++) put(o + i, to_float(row[i]) * scale);
        }
    });
}

}  // namespace

EXPORT(embedding) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *table = in.pointer<const void>();
    const int32_t *ids = in.pointer<const int32_t>();
    const int64_t count = in.number();
    const int64_t rows = in.number();
    const int64_t width = in.number();
    const int64_t out_stride = in.number();
    const float scale = in.real();
    const int64_t dtype = in.number();
    const int64_t table_dtype = in.number();
    for (int64_t t = 0; t < count; t++)
        if (ids[t] < 0 || ids[t] >= rows) return t + 1;
#define CASE(T, W) run((T *)out, (const W *)table, ids, count, width, out_stride, scale)
    if (dtype == F32 && table_dtype == F32) CASE(float, float);
    else if (dtype == F32) CASE(float, bf16);
    else if (table_dtype == F32) CASE(bf16, float);
    else CASE(bf16, bf16);
#undef CASE
    return 0;
}
