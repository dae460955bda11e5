/* Contexts of the host's own renderers in a guest: a Venus context (capset 4) and a virgl context (capset 2), open at the
 * same time, each with blobs that are made, mapped and written, and with commands that the host answers. Each round
 * prints "round N"; the exit status is 0 when every answer was right.
 *
 * Built with the guest kernel's headers. Numbers: the kernel's virtgpu_drm.h, Mesa's virgl_protocol.h and the Venus
 * protocol's command types. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <drm/virtgpu_drm.h>

enum { CAPSET_VIRGL2 = 2, CAPSET_VENUS = 4, SIZE = 64 * 1024 };

/* Venus: command types, and the flag that asks for a reply. */
enum { VK_ENUMERATE_INSTANCE_VERSION = 137, VK_SET_REPLY_COMMAND_STREAM = 178, GENERATE_REPLY = 1 };

/* virgl: a command that writes its own bytes into a resource, and what a plain vertex buffer is. */
enum { VIRGL_INLINE_WRITE = 9, PIPE_BUFFER = 0, FORMAT_R8_UNORM = 64, BIND_VERTEX_BUFFER = 1 << 4 };

struct object {
    uint32_t handle, resource;
    volatile uint32_t *words;
};

static void fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static void call(int node, unsigned long request, void *argument, const char *what)
{
    if (ioctl(node, request, argument))
        fail(what);
}

static int open_context(uint64_t capset)
{
    int node = open("/dev/dri/renderD128", O_RDWR | O_CLOEXEC);
    if (node < 0)
        fail("open the render node");
    struct drm_virtgpu_context_set_param param = {VIRTGPU_CONTEXT_PARAM_CAPSET_ID, capset};
    struct drm_virtgpu_context_init init = {.num_params = 1, .ctx_set_params = (uintptr_t)&param};
    call(node, DRM_IOCTL_VIRTGPU_CONTEXT_INIT, &init, "make a context");
    return node;
}

static void map(int node, struct object *object)
{
    struct drm_virtgpu_map map = {.handle = object->handle};
    call(node, DRM_IOCTL_VIRTGPU_MAP, &map, "map an object");
    void *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, node, map.offset);
    if (memory == MAP_FAILED)
        fail("mmap an object");
    object->words = memory;
}

/* A mapped blob, after a check that it keeps what is written. */
static struct object blob(int node, uint32_t memory)
{
    struct drm_virtgpu_resource_create_blob create = {
        .blob_mem = memory, .blob_flags = VIRTGPU_BLOB_FLAG_USE_MAPPABLE, .size = SIZE};
    call(node, DRM_IOCTL_VIRTGPU_RESOURCE_CREATE_BLOB, &create, "make a blob");
    struct object object = {create.bo_handle, create.res_handle, NULL};
    map(node, &object);
    for (uint32_t i = 0; i < SIZE / 4; i++)
        object.words[i] = i * 2654435761u;
    for (uint32_t i = 0; i < SIZE / 4; i++)
        if (object.words[i] != i * 2654435761u)
            fail("read a blob back");
    return object;
}

static void submit(int node, const uint32_t *words, uint32_t count, uint32_t handle)
{
    struct drm_virtgpu_execbuffer submit = {.size = count * 4,
                                            .command = (uintptr_t)words,
                                            .bo_handles = (uintptr_t)&handle,
                                            .num_bo_handles = 1,
                                            .fence_fd = -1};
    call(node, DRM_IOCTL_VIRTGPU_EXECBUFFER, &submit, "submit");
}

static void wait_for(int node, uint32_t handle)
{
    struct drm_virtgpu_3d_wait wait = {.handle = handle};
    while (ioctl(node, DRM_IOCTL_VIRTGPU_WAIT, &wait))
        if (errno != EINTR && errno != EBUSY)
            fail("wait");
}

/* Asks the Venus renderer for its Vulkan version; the answer comes through the blob. */
static void venus_round(int node, struct object *reply)
{
    const uint32_t words[] = {
        VK_SET_REPLY_COMMAND_STREAM, 0, 1, 0, reply->resource, 0, 0, SIZE, 0,
        VK_ENUMERATE_INSTANCE_VERSION, GENERATE_REPLY, 1, 0,
    };
    reply->words[4] = 0;
    submit(node, words, sizeof words / 4, reply->handle);
    wait_for(node, reply->handle);
    /* The fence is the submission's; the renderer may still be at work. */
    for (int i = 0; reply->words[4] == 0 && i < 2000; i++)
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    uint32_t version = reply->words[4];
    if (reply->words[0] != VK_ENUMERATE_INSTANCE_VERSION || reply->words[1] != 0 || version >> 22 != 1) {
        printf("Venus answered %u %u %#x\n", reply->words[0], reply->words[1], version);
        exit(1);
    }
}

/* Lets the virgl renderer write into a buffer of its own, and reads that back. */
static void virgl_round(int node, struct object *buffer, uint32_t value)
{
    const uint32_t words[] = {
        12 << 16 | VIRGL_INLINE_WRITE, buffer->resource, 0, 0, 0, 0, 0, 0, 0, 4, 1, 1, value,
    };
    submit(node, words, sizeof words / 4, buffer->handle);
    struct drm_virtgpu_3d_transfer_from_host transfer = {.bo_handle = buffer->handle,
                                                         .box = {.w = 4, .h = 1, .d = 1}};
    call(node, DRM_IOCTL_VIRTGPU_TRANSFER_FROM_HOST, &transfer, "read a resource");
    wait_for(node, buffer->handle);
    if (buffer->words[0] != value) {
        printf("virgl wrote %#x, not %#x\n", buffer->words[0], value);
        exit(1);
    }
}

int main(int count, char **arguments)
{
    int rounds = count > 1 ? atoi(arguments[1]) : 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int venus = open_context(CAPSET_VENUS), virgl = open_context(CAPSET_VIRGL2);
    struct object reply = blob(venus, VIRTGPU_BLOB_MEM_HOST3D);
    blob(venus, VIRTGPU_BLOB_MEM_GUEST);
    blob(virgl, VIRTGPU_BLOB_MEM_GUEST);
    struct drm_virtgpu_resource_create create = {.target = PIPE_BUFFER, .format = FORMAT_R8_UNORM,
        .bind = BIND_VERTEX_BUFFER, .width = SIZE, .height = 1, .depth = 1, .array_size = 1, .size = SIZE};
    call(virgl, DRM_IOCTL_VIRTGPU_RESOURCE_CREATE, &create, "make a resource");
    struct object buffer = {create.bo_handle, create.res_handle, NULL};
    map(virgl, &buffer);
    for (int i = 1; i <= rounds; i++) {
        venus_round(venus, &reply);
        virgl_round(virgl, &buffer, 0x1000 + i);
        printf("round %d\n", i);
        /* Leaves the guest's processor to others. */
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return 0;
}
