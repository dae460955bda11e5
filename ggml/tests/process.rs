//! A backend finds the ggml of its program, whether the program shares the library's symbols or keeps them to itself.
//!
//! Each case runs in a process of its own: this test program again, told by the environment what to load.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![cfg(target_os = "linux")]

use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;
use std::process::{Command, Output};

use apir_ggml::abi;
use apir_ggml::layout::BufferTypeBox;
use apir_ggml::process::{GgmlBase, LogLevel};

const CHILD: &str = "APIR_TEST_LOAD";

/// Runs the case in a child that loads `library` with `flags` first.
fn run_child(library: &str, flags: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "ggml_is_found_either_way", "--nocapture"])
        .env(CHILD, format!("{flags}:{library}"))
        .output()
        .unwrap()
}

fn libraries() -> Vec<PathBuf> {
    let llama = std::env::var_os("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR names llama.cpp's build folder");
    let mut libraries = vec![PathBuf::from(llama).join("libggml-cpu.so")];
    libraries.extend(std::env::var_os("APIR_GGML_CPU_API2").map(PathBuf::from));
    libraries
}

/// What a child does.
fn child(case: &str) {
    let (flags, library) = case.split_once(':').unwrap();
    let flags = if flags == "global" { libc::RTLD_GLOBAL } else { libc::RTLD_LOCAL };
    let path = CString::new(library).unwrap();
    // SAFETY: the library is a peer's.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | flags) };
    assert!(!handle.is_null(), "{library} loads");
    let base = GgmlBase::find().unwrap();
    println!("found ggml {} with API {}", base.version(), base.layout().api_version());
    base.log(LogLevel::Warn, c"100% of a line");
    make_and_free_a_buffer(&base, handle);
}

/// Makes a buffer, has ggml read its vtable and free it.
fn make_and_free_a_buffer(base: &GgmlBase, ggml: *mut c_void) {
    unsafe extern "C" fn free(buffer: *mut abi::Buffer) {
        // SAFETY: the context is the number below.
        unsafe { *(*buffer).context.cast::<c_int>() += 1 };
    }
    unsafe extern "C" fn get_base(_: *mut abi::Buffer) -> *mut c_void {
        std::ptr::without_provenance_mut(0x10000)
    }
    unsafe extern "C" fn alignment(_: *mut abi::BufferType) -> usize {
        64
    }
    let iface = abi::BufferTypeIfaceV2 {
        get_name: None,
        alloc_buffer: None,
        get_alignment: Some(alignment),
        get_max_size: None,
        get_alloc_size: None,
        is_host: None,
    };
    let buffer_type = BufferTypeBox::new(base.layout(), iface, std::ptr::null_mut(), std::ptr::null_mut());
    let iface = abi::BufferIface {
        free_buffer: Some(free),
        get_base: Some(get_base),
        init_tensor: None,
        memset_tensor: None,
        set_tensor: None,
        get_tensor: None,
        set_tensor_2d: None,
        get_tensor_2d: None,
        cpy_tensor: None,
        clear: None,
        reset: None,
    };
    let mut freed: c_int = 0;
    // SAFETY: the functions are ggml's, found by name in the library or in what it needs; the buffer type outlives the buffer.
    unsafe {
        let function = |name: &std::ffi::CStr| {
            let function = libc::dlsym(ggml, name.as_ptr());
            assert!(!function.is_null());
            function
        };
        type SizeFn = unsafe extern "C" fn(*mut abi::Buffer) -> usize;
        let size: SizeFn = std::mem::transmute(function(c"ggml_backend_buffer_get_size"));
        let align: SizeFn = std::mem::transmute(function(c"ggml_backend_buffer_get_alignment"));
        let address: unsafe extern "C" fn(*mut abi::Buffer) -> *mut c_void =
            std::mem::transmute(function(c"ggml_backend_buffer_get_base"));
        let free: unsafe extern "C" fn(*mut abi::Buffer) =
            std::mem::transmute(function(c"ggml_backend_buffer_free"));
        let buffer = base.buffer_init(buffer_type.as_ptr(), iface, (&raw mut freed).cast(), 4096);
        assert_eq!((size(buffer), align(buffer), address(buffer).addr()), (4096, 64, 0x10000));
        assert_eq!(((*buffer).size, (*buffer).usage), (4096, 0));
        free(buffer);
    }
    assert_eq!(freed, 1);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn ggml_is_found_either_way() {
    if let Ok(case) = std::env::var(CHILD) {
        return child(&case);
    }
    for library in libraries() {
        for flags in ["global", "local"] {
            let output = run_child(library.to_str().unwrap(), flags);
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{flags}: {out}{err}");
            let found = out.lines().find(|line| line.starts_with("found ggml ")).expect("ggml is found");
            println!("{} {flags}: {found}", library.display());
            assert!(err.contains("100% of a line\n"), "the line reaches ggml's log: {err}");
        }
    }
}
