/* Stands in for a CPU backend: its one kernel writes a range of bytes, counted from the start of its work memory. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct plan {
    size_t work_size;
    uint8_t *work_data;
    int n_threads;
};

struct range {
    long from, to;
};

int ggml_graph_compute(void *graph, struct plan *plan) {
    const struct range *range = graph;
    memset(plan->work_data + range->from, 1, (size_t) (range->to - range->from));
    return 7;
}

/* As a backend does it: in a larger memory that it has kept from an earlier graph. Gives the status, and -1 when the plan comes back changed. */
int compute(size_t work_size, long from, long to) {
    static uint8_t kept[1 << 20];
    uint8_t *own = kept + (1 << 19);
    struct range range = { from, to };
    struct plan plan = { work_size, own, 3 };
    int status = ggml_graph_compute(&range, &plan);
    return plan.work_data == own && plan.work_size == work_size ? status : -1;
}
