/* An APIR plugin that carries out nothing and answers every command with success and noise. */
#include <stdint.h>

__attribute__((visibility("default"))) uint32_t apir_backend_initialize(uint32_t context, const void *callbacks)
{
    (void)context, (void)callbacks;
    return 6;
}

__attribute__((visibility("default"))) void apir_backend_deinit(uint32_t context)
{
    (void)context;
}

__attribute__((visibility("default"))) uint32_t
apir_backend_dispatcher(uint32_t context, const void *callbacks, uint32_t command, const char *from,
                        const char *from_end, char *to, const char *to_end, char **to_after)
{
    static uint32_t noise = 2463534242u;
    (void)context, (void)callbacks, (void)command, (void)from, (void)from_end;
    for (*to_after = to; *to_after < to_end; ++*to_after) {
        noise ^= noise << 13;
        noise ^= noise >> 17;
        noise ^= noise << 5;
        **to_after = (char)noise;
    }
    return 0;
}
