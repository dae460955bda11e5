/* ggml's assertions in a build for fuzzing, but for those about values: random graphs make NaN, infinity and zero, which kernels bear. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef assert
#define APIR_NAMES(condition, text) (strstr(#condition, text) != NULL)
#define assert(condition)                                                                            \
    ((condition) || APIR_NAMES(condition, "isnan") || APIR_NAMES(condition, "isinf")                 \
             || APIR_NAMES(condition, "sum > 0.0") || APIR_NAMES(condition, "sum_softmax >= 0.0")    \
             || APIR_NAMES(condition, "scale > 0.0f") || APIR_NAMES(condition, "diag != 0.0f")       \
             || APIR_NAMES(condition, "fabsf(fval)")                                                 \
         ? (void) 0                                                                                  \
         : (fprintf(stderr, "%s:%d: assertion failed: %s\n", __FILE__, __LINE__, #condition), abort()))

/* Threads of ggml's own pool wait around this. With more threads than processors each wait would take a slice of time. */
#ifdef __x86_64__
#include <immintrin.h>
#include <sched.h>
#define _mm_pause() ((void) sched_yield())
#endif

#ifndef __cplusplus
#undef static_assert
#define static_assert _Static_assert
#endif
