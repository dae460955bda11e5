/* ggml's CPU backend as a release to come may number things: an operation, a map of UNARY and a unit of GLU are inserted, and each
 * number behind them is one more. What it is given in its own numbers it hands to ggml in ggml's. */
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <dlfcn.h>
#include <stdlib.h>

/* The numbers of what is inserted. */
enum { OP = 50, MAP = 3, UNIT = 0 };

#define EXPORT __attribute__((visibility("default")))

static bool (*cpu_supports)(ggml_backend_dev_t, const struct ggml_tensor *);
static ggml_backend_t (*cpu_init)(ggml_backend_dev_t, const char *);
static enum ggml_status (*cpu_compute)(ggml_backend_t, struct ggml_cgraph *);

/* ggml's own names. */
static const char *(*op_name)(enum ggml_op);
static const char *(*map_name)(enum ggml_unary_op);
static const char *(*unit_name)(enum ggml_glu_op);

EXPORT const char *ggml_version(void)
{
    return "0.28.0";
}

EXPORT const char *ggml_op_name(enum ggml_op op)
{
    return op == OP ? "INSERTED" : op_name(op - (op > OP));
}

EXPORT const char *ggml_unary_op_name(enum ggml_unary_op map)
{
    return map == MAP ? "INSERTED" : map_name(map - (map > MAP));
}

EXPORT const char *ggml_glu_op_name(enum ggml_glu_op unit)
{
    return unit == UNIT ? "INSERTED" : unit_name(unit - (unit > UNIT));
}

/* To ggml's numbers. */
static void unshift(struct ggml_tensor *node)
{
    node->op -= node->op > OP;
    if (node->op == GGML_OP_UNARY)
        node->op_params[0] -= node->op_params[0] > MAP;
    if (node->op == GGML_OP_GLU)
        node->op_params[0] -= node->op_params[0] > UNIT;
}

static bool supports(ggml_backend_dev_t device, const struct ggml_tensor *node)
{
    struct ggml_tensor copy = *node;
    unshift(&copy);
    return cpu_supports(device, &copy);
}

static enum ggml_status compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    int count = ggml_graph_n_nodes(graph);
    struct { enum ggml_op op; int32_t param; } *own = calloc(count, sizeof(*own));
    if (!own)
        return GGML_STATUS_ALLOC_FAILED;
    for (int i = 0; i < count; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        own[i].op = node->op;
        own[i].param = node->op_params[0];
        unshift(node);
    }
    enum ggml_status status = cpu_compute(backend, graph);
    for (int i = 0; i < count; i++) {
        ggml_graph_node(graph, i)->op = own[i].op;
        ggml_graph_node(graph, i)->op_params[0] = own[i].param;
    }
    free(own);
    return status;
}

static ggml_backend_t init(ggml_backend_dev_t device, const char *params)
{
    ggml_backend_t backend = cpu_init(device, params);
    if (backend && backend->iface.graph_compute != compute) {
        cpu_compute = backend->iface.graph_compute;
        backend->iface.graph_compute = compute;
    }
    return backend;
}

EXPORT ggml_backend_reg_t ggml_backend_init(void)
{
    ggml_backend_reg_t registry = ggml_backend_cpu_reg();
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry, 0);
    if (device->iface.init_backend != init) {
        cpu_supports = device->iface.supports_op;
        cpu_init = device->iface.init_backend;
        device->iface.supports_op = supports;
        device->iface.init_backend = init;
    }
    return registry;
}

/* The names of the ggml that is linked, which this library hides from who asks it for them. */
__attribute__((constructor)) static void find_names(void)
{
    void *base = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
    op_name = dlsym(base, "ggml_op_name");
    map_name = dlsym(base, "ggml_unary_op_name");
    unit_name = dlsym(base, "ggml_glu_op_name");
}
