//! The structs against ggml's own headers: a C++ program prints where the compiler puts each field.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use apir_ggml::abi;

/// A number both sides know: the C++ expression, and its value here.
type Fact = (String, usize);

/// Facts on a struct: its size, and the offset of each field, with the C name where it differs.
macro_rules! facts {
    ($facts:ident, $rust:ident = $c:literal { $($field:ident $(= $c_field:literal)?),* $(,)? }) => {
        $facts.push((format!("sizeof({})", $c), size_of::<abi::$rust>()));
        $(
            #[allow(unused_mut, unused_assignments)]
            let mut c_field = stringify!($field);
            $( c_field = $c_field; )?
            $facts.push((format!("offsetof({}, {c_field})", $c), offset_of!(abi::$rust, $field)));
        )*
    };
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    facts!(facts, Reg = "ggml_backend_reg" { api_version, iface, context });
    facts!(facts, RegIface = "ggml_backend_reg_i" { get_name, get_device_count, get_device, get_proc_address });
    facts!(facts, Device = "ggml_backend_device" { iface, reg, context });
    facts!(facts, DeviceIface = "ggml_backend_device_i" {
        get_name, get_description, get_memory, get_type, get_props, init_backend, get_buffer_type, get_host_buffer_type,
        buffer_from_host_ptr, supports_op, supports_buft, offload_op, event_new, event_free, event_synchronize,
    });
    facts!(facts, DeviceProps = "ggml_backend_dev_props" {
        name, description, memory_free, memory_total, type_ = "type", device_id, caps,
    });
    facts!(facts, DeviceCaps = "ggml_backend_dev_caps" {
        async_ = "async", host_buffer, buffer_from_host_ptr, events, mmap_support,
    });
    facts!(facts, Event = "ggml_backend_event" { device, context });
    facts!(facts, BufferTypeIfaceV3 = "ggml_backend_buffer_type_i" {
        get_name, alloc_buffer, alloc_buffer_n, get_alignment, get_max_size, get_alloc_size, get_alloc_size_n, is_host,
    });
    facts!(facts, BufferTypeV3 = "ggml_backend_buffer_type" { iface, device, context });
    facts!(facts, Buffer = "ggml_backend_buffer" { iface, buft, context, size, usage });
    facts!(facts, BufferIface = "ggml_backend_buffer_i" {
        free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, set_tensor_2d, get_tensor_2d,
        cpy_tensor, clear, reset,
    });
    facts!(facts, Backend = "ggml_backend" { guid, iface, device, context });
    facts!(facts, BackendIface = "ggml_backend_i" {
        get_name, free, set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async, cpy_tensor_async,
        synchronize, graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute, graph_compute,
        event_record, event_wait, graph_optimize,
    });
    facts!(facts, GraphOptimizeParams = "ggml_backend_graph_optimize_params" { add_alloc_dep, user_data });
    facts!(facts, Tensor = "ggml_tensor" {
        type_ = "type", buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name, extra, padding,
    });
    facts!(facts, HashSet = "ggml_hash_set" { size, used, keys });
    facts!(facts, CGraph = "ggml_cgraph" {
        size, n_nodes, n_leafs, nodes, grads, grad_accs, leafs, use_counts, visited_hash_set, order, uid,
    });
    let mut constant = |name: &str, value: usize| facts.push((format!("(size_t) {name}"), value));
    constant("GGML_BACKEND_API_VERSION", 3);
    constant("GGML_MAX_DIMS", abi::MAX_DIMS);
    constant("GGML_MAX_SRC", abi::MAX_SRC);
    constant("GGML_MAX_OP_PARAMS / 4", abi::OP_PARAM_WORDS);
    constant("GGML_MAX_NAME", abi::MAX_NAME);
    constant("GGML_OP_NONE", abi::OP_NONE as usize);
    constant("GGML_TENSOR_FLAG_INPUT", abi::FLAG_INPUT as usize);
    constant("GGML_TENSOR_FLAG_OUTPUT", abi::FLAG_OUTPUT as usize);
    constant("GGML_TENSOR_FLAG_PARAM", abi::FLAG_PARAM as usize);
    constant("GGML_TENSOR_FLAG_LOSS", abi::FLAG_LOSS as usize);
    constant("GGML_TENSOR_FLAG_COMPUTE", abi::FLAG_COMPUTE as usize);
    constant("GGML_BACKEND_DEVICE_TYPE_GPU", apir_ggml::DeviceType::Gpu.number() as usize);
    constant("GGML_BACKEND_DEVICE_TYPE_META", apir_ggml::DeviceType::Meta.number() as usize);
    constant("GGML_STATUS_ABORTED", apir_ggml::Status::Aborted.number() as usize);
    constant("(GGML_STATUS_ALLOC_FAILED + 2)", 0);
    #[cfg(target_os = "linux")]
    {
        use apir_ggml::process::LogLevel;
        constant("GGML_LOG_LEVEL_DEBUG", LogLevel::Debug as usize);
        constant("GGML_LOG_LEVEL_ERROR", LogLevel::Error as usize);
    }
    facts
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn structs_lie_as_ggmls_headers_say() {
    let source = std::env::var_os("APIR_LLAMA_SRC").expect("APIR_LLAMA_SRC names llama.cpp's source folder");
    let ggml = Path::new(&source).join("ggml");
    let facts = facts();
    let mut program = String::from(
        "#include <cstddef>\n#include <cstdio>\n#include \"ggml-impl.h\"\n#include \"ggml-backend-impl.h\"\nint main() {\n",
    );
    for (expression, _) in &facts {
        writeln!(program, "std::printf(\"%s = %zu\\n\", \"{expression}\", {expression});").unwrap();
    }
    program.push_str("}\n");
    let folder = std::env::temp_dir().join(format!("apir-ggml-abi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (file, binary) = (folder.join("abi.cpp"), folder.join("abi"));
    std::fs::write(&file, program).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let compiled = Command::new(&compiler)
        // Optimized, so that functions of the headers that nobody calls need no library.
        .args(["-std=c++17", "-w", "-O1", "-o"])
        .arg(&binary)
        .arg(&file)
        .arg("-I")
        .arg(ggml.join("include"))
        .arg("-I")
        .arg(ggml.join("src"))
        .status()
        .unwrap();
    assert!(compiled.success(), "{compiler} compiles ggml's headers");
    let output = Command::new(&binary).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let theirs: BTreeMap<&str, usize> = output
        .lines()
        .map(|line| line.split_once(" = ").unwrap())
        .map(|(expression, value)| (expression, value.parse().unwrap()))
        .collect();
    println!("{} facts compared", facts.len());
    for (expression, ours) in &facts {
        assert_eq!(theirs.get(expression.as_str()), Some(ours), "{expression}");
    }
}
