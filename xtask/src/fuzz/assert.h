/* ggml's assertions in a build for fuzzing, but for those about values: random graphs make NaN and infinity, which kernels bear. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef assert
#define assert(condition)                                                                   \
    ((condition) || strstr(#condition, "isnan") || strstr(#condition, "isinf")              \
         ? (void) 0                                                                         \
         : (fprintf(stderr, "%s:%d: assertion failed: %s\n", __FILE__, __LINE__, #condition), abort()))

#ifndef __cplusplus
#undef static_assert
#define static_assert _Static_assert
#endif
