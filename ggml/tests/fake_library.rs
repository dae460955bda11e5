//! Libraries that are not quite a supported ggml backend are refused with a line that says why.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use apir_ggml::GgmlLibrary;

/// The parts of a proper library.
const VERSION: &str = "const char * ggml_version(void) { return \"0.25.1\"; }";
const FREE: &str = "void ggml_backend_buffer_free(void * buffer) { (void) buffer; }";
const OPS: &str = "const char * ggml_op_name(int op) { (void) op; return \"GLU\"; }\n\
    const char * ggml_unary_op_name(int op) { (void) op; return \"ABS\"; }\n\
    const char * ggml_glu_op_name(int op) { (void) op; return \"REGLU\"; }\n\
    const char * ggml_type_name(int type) { (void) type; return \"f32\"; }\n\
    void ggml_log_set(void * callback, void * data) { (void) callback; (void) data; }";
const INIT: &str = "static struct { int api; void * slots[5]; } reg = { 2, { 0 } }; void * ggml_backend_init(void) { return &reg; }";

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Compiles the parts to a library of this name, opens it and gives what it is, or the error.
fn open(folder: &Path, name: &str, parts: &[&str]) -> String {
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&source, parts.join("\n")).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled =
        Command::new(compiler).args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(compiled.success(), "{name} compiles");
    // SAFETY: the library is the one above; nothing is computed.
    let opened = unsafe { GgmlLibrary::open(&library, None) };
    let text = opened.map_or_else(|error| error.to_string(), |library| library.describe());
    text.replace(&format!("ggml library {}: ", library.display()), "")
}

#[test]
fn t31_what_is_wrong_is_said() {
    let folder = Folder(std::env::temp_dir().join(format!("apir-ggml-fake-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).unwrap();
    let open = |name: &str, parts: &[&str]| open(&folder.0, name, parts);
    let lacks = |symbol: &str| format!("no symbol {symbol} in it or in the libraries it needs");

    assert_eq!(
        open("proper", &[VERSION, FREE, OPS, INIT]),
        "ggml 0.25.1, backend API 2, registry  with 0 devices; oldest supported 0.13.0"
    );
    assert_eq!(
        open("empty", &[]),
        "not a ggml backend: neither it nor a library that it needs is ggml's; \
         name one such as libggml-cpu.so or libggml-cuda.so"
    );
    assert_eq!(open("no_free", &[VERSION, OPS, INIT]), lacks("ggml_backend_buffer_free"));
    assert_eq!(
        open("no_init", &[VERSION, FREE, OPS]),
        "not a ggml backend: it has no function ggml_backend_init, as libggml.so and libggml-base.so have none; \
         name a backend beside it such as libggml-cpu.so"
    );
    // A build without dynamic loading.
    assert_eq!(
        open("own_reg", &[VERSION, FREE, OPS, "void * ggml_backend_cpu_reg(void) { return 0; }"]),
        "not a ggml backend: it has no function ggml_backend_init; its registration function is ggml_backend_cpu_reg"
    );
    // Its registration must not run, nor its devices be asked.
    let illegal = "void * ggml_backend_init(void) { __builtin_trap(); }";
    assert_eq!(
        open("other_processor", &[VERSION, FREE, OPS, illegal, "int ggml_backend_score(void) { return 0; }"]),
        "this processor lacks instructions that it is built for (its ggml_backend_score is 0); name another variant"
    );
    let fits = "int ggml_backend_score(void) { return 64; }";
    assert!(open("this_processor", &[VERSION, FREE, OPS, INIT, fits]).starts_with("ggml 0.25.1, "));
    let old = VERSION.replace("0.25.1", "0.12.0");
    assert_eq!(open("old", &[&old, FREE, OPS, INIT]), "ggml: too old (0.12.0, oldest supported 0.13.0)");
    let odd = VERSION.replace("0.25.1", "master");
    assert_eq!(
        open("odd", &[&odd, FREE, OPS, INIT]),
        "ggml says it is version \"master\", which is not of the form 0.26.0"
    );
    assert_eq!(
        open("null", &[VERSION, FREE, OPS, "void * ggml_backend_init(void) { return 0; }"]),
        "ggml_backend_init gives no registration"
    );
    let mark = "void ggml_backend_buft_alloc_buffer_n(void) {}";
    assert_eq!(
        open("mixed", &[VERSION, FREE, OPS, INIT, mark]),
        "ggml_backend_init gives a backend of API 2, but its ggml 0.25.1 has API 3"
    );
}
