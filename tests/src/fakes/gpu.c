/* ggml's CPU backend that calls itself a GPU, for peers that take the host's word for it. It has the fault that APIR_TEST_FAULT
 * names, if any:
 *
 *   alloc:N   the N-th allocation fails
 *   abort     a computation aborts the process
 *   exit      a computation ends the process
 *   hang      a write to a tensor never returns
 *   slow:MS   a computation whose first node has 64 columns or more takes MS milliseconds longer
 */
#define _GNU_SOURCE
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void (*cpu_props)(ggml_backend_dev_t, struct ggml_backend_dev_props *);
static ggml_backend_t (*cpu_init)(ggml_backend_dev_t, const char *);
static ggml_backend_buffer_t (*cpu_alloc)(ggml_backend_buffer_type_t, size_t);
static enum ggml_status (*cpu_compute)(ggml_backend_t, struct ggml_cgraph *);

/* What follows the fault's name, or NULL when another one is asked for. */
static const char *fault(const char *name)
{
    const char *asked = getenv("APIR_TEST_FAULT");
    size_t length = strlen(name);
    return asked && strncmp(asked, name, length) == 0 ? asked + length : NULL;
}

static enum ggml_backend_dev_type type(ggml_backend_dev_t device)
{
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props)
{
    cpu_props(device, props);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->caps.buffer_from_host_ptr = false;
}

static void hang(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *data, size_t offset,
                 size_t size)
{
    (void)buffer, (void)tensor, (void)data, (void)offset, (void)size;
    for (;;)
        pause();
}

static ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t buft, size_t size)
{
    static int count;
    const char *failing = fault("alloc:");
    if (failing && ++count == atoi(failing))
        return NULL;
    ggml_backend_buffer_t buffer = cpu_alloc(buft, size);
    if (buffer && fault("hang"))
        buffer->iface.set_tensor = hang;
    return buffer;
}

static enum ggml_status compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    const char *slow = fault("slow:");
    if (fault("abort"))
        abort();
    if (fault("exit"))
        exit(3);
    if (slow && ggml_graph_n_nodes(graph) > 0 && ggml_graph_node(graph, 0)->ne[0] >= 64)
        usleep(1000u * (unsigned)atoi(slow));
    return cpu_compute(backend, graph);
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

__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void)
{
    ggml_backend_reg_t registry = ggml_backend_cpu_reg();
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry, 0);
    if (device->iface.get_type != type) {
        ggml_backend_buffer_type_t buft = device->iface.get_buffer_type(device);
        cpu_props = device->iface.get_props;
        cpu_init = device->iface.init_backend;
        cpu_alloc = buft->iface.alloc_buffer;
        device->iface.get_props = props;
        device->iface.get_type = type;
        device->iface.init_backend = init;
        buft->iface.alloc_buffer = alloc;
    }
    return registry;
}
