/* ggml_graph_compute of whatever CPU backend is opened after this library: the work memory of each graph lies between two guards that nothing may
 * touch, and is no larger than planned. A backend by itself keeps the largest work memory that it ever had, so that a kernel which uses more than
 * planned would be seen only by the first graph. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The first fields of ggml_cplan, which are the same in every supported version. */
struct plan {
    size_t work_size;
    uint8_t *work_data;
    int n_threads;
};

typedef int compute_fn(void *graph, struct plan *plan);

/* What `new` aligns bytes to. */
enum { ALIGN = 16 };
/* Between a guard and the work memory. */
enum { FILLER = 0xa5 };
/* Bytes of each guard: what belongs to the next threads lies that far behind. */
enum { GUARD = 1 << 20 };

static atomic_ulong guarded;

/* How many graphs were computed with a guard. */
unsigned long apir_guard_count(void) {
    return atomic_load(&guarded);
}

static atomic_ulong planned_work, planned_threads;

/* What was planned for the last graph: bytes of work memory, and threads. */
unsigned long apir_guard_work(void) {
    return atomic_load(&planned_work);
}

unsigned long apir_guard_threads(void) {
    return atomic_load(&planned_threads);
}

static void fail(const char *what) {
    fprintf(stderr, "guard: %s\n", what);
    abort();
}

/* The function that the calling library would have called without this one. */
static compute_fn *real_function(const void *caller) {
    Dl_info info;
    if (dladdr(caller, &info) == 0) {
        fail("the caller of ggml_graph_compute is in no library");
    }
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *function = library == NULL ? NULL : dlsym(library, "ggml_graph_compute");
    if (function == NULL) {
        fail("the caller of ggml_graph_compute has no function of this name");
    }
    /* The caller runs, so that its library stays. */
    dlclose(library);
    return (compute_fn *) function;
}

static void check(const uint8_t *from, const uint8_t *to, const char *what) {
    for (; from < to; from++) {
        if (*from != FILLER) {
            fail(what);
        }
    }
}

int ggml_graph_compute(void *graph, struct plan *plan) {
    compute_fn *real = real_function(__builtin_return_address(0));
    atomic_store(&planned_work, plan->work_size);
    atomic_store(&planned_threads, (unsigned long) plan->n_threads);
    if (plan->work_size == 0) {
        return real(graph, plan);
    }
    size_t page = (size_t) sysconf(_SC_PAGESIZE);
    size_t inner = (plan->work_size + page - 1) / page * page;
    uint8_t *start = mmap(NULL, inner + 2 * (size_t) GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        /* A test of a process that has no memory left: it is not counted. */
        return real(graph, plan);
    }
    if (mprotect(start + GUARD, inner, PROT_READ | PROT_WRITE) != 0) {
        munmap(start, inner + 2 * (size_t) GUARD);
        return real(graph, plan);
    }
    uint8_t *end = start + GUARD + inner;
    uint8_t *own = plan->work_data;
    uint8_t *work = (uint8_t *) ((uintptr_t) (end - plan->work_size) / ALIGN * ALIGN);
    uint8_t *behind = work + plan->work_size;
    memset(start + GUARD, FILLER, (size_t) (work - start) - GUARD);
    memset(behind, FILLER, (size_t) (end - behind));

    plan->work_data = work;
    int status = real(graph, plan);
    plan->work_data = own;

    check(start + GUARD, work, "a kernel wrote in front of its work memory");
    check(behind, end, "a kernel wrote behind its work memory");
    munmap(start, inner + 2 * (size_t) GUARD);
    atomic_fetch_add(&guarded, 1);
    return status;
}
