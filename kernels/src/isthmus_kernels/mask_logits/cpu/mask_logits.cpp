// -inf where a mask has no bit, a row of logits after another. Whole bytes of ones or zeros are the rule.
#include "common.h"

namespace {

template <class T>
void run(T *logits, const int64_t *rows, const uint8_t *masks, int64_t count, int64_t vocab, int64_t width,
         int64_t stride) {
    parallel_ranges(count, count * vocab, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            T *row = logits + rows[r] * stride;
            const uint8_t *mask = masks + r * width;
            const int64_t known = width * 8 < vocab ? width * 8 : vocab;
            for (int64_t i = 0; i < known; i += 8) {
                const uint8_t bits = mask[i / 8];
                if (bits == 0xff) continue;
                const int64_t upto = known - i < 8 ? known - i : 8;
                for (int64_t b = 0; b < upto; b++)
                    if (!(bits >> b & 1)) put(row + i + b, -INFINITY);
            }
            for (int64_t i = known; i < vocab; i++) put(row + i, -INFINITY);
        }
    });
}

}  // namespace

EXPORT(mask_logits) {
    Arguments in = {arguments};
    void *logits = in.pointer<void>();
    const int64_t *rows = in.pointer<const int64_t>();
    const uint8_t *masks = in.pointer<const uint8_t>();
    const int64_t count = in.number();
    const int64_t vocab = in.number();
    const int64_t width = in.number();
    const int64_t stride = in.number();
    const int64_t dtype = in.number();
    if (dtype == F32) run((float *)logits, rows, masks, count, vocab, width, stride);
    else run((bf16 *)logits, rows, masks, count, vocab, width, stride);
    return 0;
}
