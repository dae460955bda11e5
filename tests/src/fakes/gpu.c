/* ggml's CPU backend that calls itself a GPU, for peers that take the host's word for it. */
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

static void (*cpu_props)(ggml_backend_dev_t, struct ggml_backend_dev_props *);

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

__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void)
{
    ggml_backend_reg_t registry = ggml_backend_cpu_reg();
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry, 0);
    if (device->iface.get_type != type) {
        cpu_props = device->iface.get_props;
        device->iface.get_props = props;
        device->iface.get_type = type;
    }
    return registry;
}
