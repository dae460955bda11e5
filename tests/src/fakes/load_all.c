/* Loads every ggml backend before a program starts that is built for linked ones alone. */
void ggml_backend_load_all(void);

__attribute__((constructor)) static void load_all(void)
{
    ggml_backend_load_all();
}
