//! A real ggml CPU backend, loaded and driven: one of API 3, and one of API 2 where `APIR_GGML_CPU_API2` names its file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::ptr;

use apir_ggml::abi::{self, Tensor};
use apir_ggml::library::{Backend, Buffer, BufferType, Device};
use apir_ggml::{DeviceType, Error, GgmlLibrary, Graph, GraphBuilder, Status, TensorSpec, TypeInfo, extent};

const F32: u32 = 0;
const Q4_0: u32 = 2;
const ADD: u32 = 2;
const MUL: u32 = 7;
const RMS_NORM: u32 = 25;
const MUL_MAT: u32 = 29;

/// The libraries to test, by their file.
fn cpu_libraries() -> Vec<PathBuf> {
    let llama = std::env::var_os("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR names llama.cpp's build folder");
    let mut paths = vec![Path::new(&llama).join("libggml-cpu.so")];
    paths.extend(std::env::var_os("APIR_GGML_CPU_API2").map(PathBuf::from));
    paths
}

fn open(path: &Path) -> GgmlLibrary {
    // SAFETY: the file is a peer's CPU backend, and the graphs below are proper ones.
    unsafe { GgmlLibrary::open(path, None) }.expect("the library opens")
}

/// A CPU device and a backend on it with one thread.
struct Cpu {
    device: Device,
    buffers: BufferType,
    backend: Backend,
}

impl Cpu {
    fn new(library: &GgmlLibrary) -> Self {
        let device = library.registry().device(0).unwrap();
        let backend = device.init_backend().unwrap();
        assert!(backend.set_n_threads(1));
        Self { buffers: device.buffer_type().unwrap(), device, backend }
    }
}

fn each_cpu(test: impl Fn(&Cpu)) {
    for path in cpu_libraries() {
        test(&Cpu::new(&open(&path)));
    }
}

fn dense(type_: u32, ne: [i64; 4]) -> TensorSpec<'static> {
    let nb = TypeInfo::get(type_).unwrap().dense_strides(ne).unwrap();
    TensorSpec { type_, ne, nb, ..TensorSpec::default() }
}

fn operation(op: u32, ne: [i64; 4], src: &[usize]) -> TensorSpec<'static> {
    let mut spec = TensorSpec { op, flags: abi::FLAG_COMPUTE, ..dense(F32, ne) };
    for (slot, &source) in spec.src.iter_mut().zip(src) {
        *slot = Some(source);
    }
    spec
}

/// The tensor to reach the data of `spec` by.
fn placed(spec: &TensorSpec<'_>) -> Tensor {
    Tensor {
        type_: spec.type_,
        ne: spec.ne,
        nb: spec.nb,
        data: ptr::with_exposed_provenance_mut(spec.data),
        ..Tensor::default()
    }
}

/// Places the tensors one after another in a buffer, 64 bytes aligned.
fn place<'a>(specs: &[TensorSpec<'a>], buffer: &'a Buffer) -> Vec<TensorSpec<'a>> {
    let mut data = buffer.base();
    specs
        .iter()
        .map(|spec| {
            let at = data;
            data += extent(spec.type_, spec.ne, spec.nb).unwrap().next_multiple_of(64) as usize;
            TensorSpec { buffer: Some(buffer), data: at, ..*spec }
        })
        .collect()
}

fn graph(specs: &[TensorSpec<'_>], nodes: &[usize]) -> Graph {
    let mut builder = GraphBuilder::new();
    for spec in specs {
        builder.add_tensor(spec).unwrap();
    }
    builder.finish(nodes, 0).unwrap()
}

fn write(buffer: &Buffer, spec: &TensorSpec<'_>, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    buffer.set_tensor(&placed(spec), &bytes, 0).unwrap();
}

fn read(buffer: &Buffer, spec: &TensorSpec<'_>) -> Vec<f32> {
    let mut bytes = vec![0; extent(spec.type_, spec.ne, spec.nb).unwrap() as usize];
    buffer.get_tensor(&placed(spec), &mut bytes, 0).unwrap();
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn libraries_describe_themselves() {
    for path in cpu_libraries() {
        let library = open(&path);
        println!("{}: {}", path.display(), library.describe());
        assert!(library.describe().ends_with("registry CPU with 1 device; oldest supported 0.13.0"));
        assert!(library.layout().graph_has_uid());
        let device = library.registry().device(0).unwrap();
        let props = device.props();
        assert_eq!((device.name().as_str(), props.name.as_str()), ("CPU", "CPU"));
        assert_eq!((device.type_(), props.type_), (DeviceType::Cpu, DeviceType::Cpu));
        assert_eq!(props.description, device.description());
        assert!(device.memory().1 > 0 && props.memory_total == device.memory().1);
        assert!(props.caps.buffer_from_host_ptr && props.caps.mmap_support && !props.caps.async_);
        let buffers = device.buffer_type().unwrap();
        assert!(buffers.is_host() && device.supports_buffer_type(&buffers));
        assert_eq!((buffers.name().as_str(), buffers.max_size()), ("CPU", usize::MAX));
        assert_eq!(buffers.alignment() % 32, 0);
        assert!(matches!(library.registry().device(1), Err(Error::NoDevice { index: 1, count: 1, .. })));
        assert!(library.registry().proc_address(c"no such function").is_none());
    }
    let versions: Vec<u32> = cpu_libraries().iter().map(|path| open(path).layout().api_version()).collect();
    assert_eq!(versions[0], 3);
    assert!(versions.get(1).is_none_or(|&version| version == 2), "APIR_GGML_CPU_API2 has API {versions:?}");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn what_is_no_backend_is_named() {
    let path = cpu_libraries().remove(0);
    // SAFETY: the files are peers' libraries.
    let message = |path: &Path, symbol| unsafe { GgmlLibrary::open(path, symbol) }.unwrap_err().to_string();
    let unknown = message(&path, Some("ggml_backend_nothing_reg"));
    let default = "it has no function ggml_backend_nothing_reg, but ggml_backend_init, the default";
    assert!(unknown.ends_with(default), "{unknown}");
    let base = message(&path.with_file_name("libggml-base.so"), None);
    assert!(
        base.contains("not a ggml backend: it has no function ggml_backend_init, as libggml.so"),
        "{base}"
    );
    let same = message(&path.with_file_name("libggml-none.so"), None);
    assert!(same.contains("libggml-none.so: No such file"), "{same}");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_registration_function_may_be_named() {
    let path = cpu_libraries().remove(0);
    // SAFETY: the file is a peer's CPU backend.
    let library = unsafe { GgmlLibrary::open(&path, Some("ggml_backend_cpu_reg")) }.unwrap();
    assert_eq!(library.registry().name(), "CPU");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn sums_and_products_are_right() {
    each_cpu(|cpu| {
        let buffer = cpu.buffers.alloc_buffer(4096).unwrap();
        let specs = [
            dense(F32, [3, 2, 1, 1]),
            dense(F32, [3, 2, 1, 1]),
            operation(ADD, [3, 2, 1, 1], &[0, 1]),
            operation(MUL_MAT, [2, 2, 1, 1], &[0, 2]),
        ];
        let specs = place(&specs, &buffer);
        write(&buffer, &specs[0], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        write(&buffer, &specs[1], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        let mut graph = graph(&specs, &[2, 3]);
        assert!(graph.uses(&buffer));
        for node in [2, 3] {
            assert!(cpu.device.supports_op(graph.tensor(node).unwrap()));
            assert_eq!(cpu.buffers.alloc_size(graph.tensor(node).unwrap()).unwrap() % 4, 0);
        }
        assert_eq!(cpu.backend.graph_compute(&mut graph), Status::Success);
        cpu.backend.synchronize();
        assert_eq!(read(&buffer, &specs[2]), [11.0, 22.0, 33.0, 44.0, 55.0, 66.0]);
        assert_eq!(read(&buffer, &specs[3]), [154.0, 352.0, 352.0, 847.0]);
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn views_read_their_source() {
    each_cpu(|cpu| {
        let buffer = cpu.buffers.alloc_buffer(1024).unwrap();
        let specs = place(&[dense(F32, [4, 1, 1, 1]), operation(ADD, [2, 1, 1, 1], &[2, 2])], &buffer);
        let view = TensorSpec {
            buffer: Some(&buffer),
            data: specs[0].data + 8,
            view_src: Some(0),
            view_offs: 8,
            ..dense(F32, [2, 1, 1, 1])
        };
        write(&buffer, &specs[0], &[1.0, 2.0, 3.0, 4.0]);
        let mut graph = graph(&[specs[0], specs[1], view], &[1]);
        assert_eq!(cpu.backend.graph_compute(&mut graph), Status::Success);
        assert_eq!(read(&buffer, &specs[1]), [6.0, 8.0]);

        let mut builder = graph.into_builder();
        builder.add_tensor(&specs[0]).unwrap();
        builder.add_tensor(&TensorSpec { view_src: Some(0), view_offs: 4, ..view }).unwrap();
        assert!(matches!(builder.finish(&[], 0), Err(Error::ViewElsewhere { index: 1, .. })));
    });
}

/// A fused RMS_NORM does not write its own result, so what was there before stays.
#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn use_counts_let_a_norm_fuse_with_its_product() {
    const STALE: [f32; 4] = [7.0; 4];
    // Only the newer CPU backend fuses at all.
    let cpu = Cpu::new(&open(&cpu_libraries()[0]));
    let norm = operation(RMS_NORM, [4, 1, 1, 1], &[0]);
    let specs =
        [dense(F32, [4, 1, 1, 1]), dense(F32, [4, 1, 1, 1]), norm, operation(MUL, [4, 1, 1, 1], &[2, 1])];
    let buffer = cpu.buffers.alloc_buffer(1024).unwrap();
    let specs = place(&specs, &buffer);
    let run = |use_count: Option<u32>| {
        write(&buffer, &specs[0], &[2.0, -2.0, 2.0, -2.0]);
        write(&buffer, &specs[1], &[1.0, 2.0, 3.0, 4.0]);
        write(&buffer, &specs[2], &STALE);
        let specs = [specs[0], specs[1], TensorSpec { use_count, ..specs[2] }, specs[3]];
        assert_eq!(cpu.backend.graph_compute(&mut graph(&specs, &[2, 3])), Status::Success);
        assert_eq!(read(&buffer, &specs[3]), [1.0, -2.0, 3.0, -4.0]);
        read(&buffer, &specs[2])
    };
    assert_eq!(run(None), STALE, "used once: fused");
    assert_eq!(run(Some(2)), [1.0, -1.0, 1.0, -1.0], "used elsewhere too: not fused");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn buffers_refuse_bytes_outside() {
    each_cpu(|cpu| {
        let buffer = cpu.buffers.alloc_buffer(256).unwrap();
        assert_eq!(buffer.size(), 256);
        assert!(buffer.buffer_type().unwrap() == cpu.buffers);
        let tensor = |offset: usize, ne: i64| {
            let spec = TensorSpec { data: buffer.base().wrapping_add(offset), ..dense(F32, [ne, 1, 1, 1]) };
            placed(&spec)
        };
        let set = |tensor: &Tensor, len: usize, offset: u64| buffer.set_tensor(tensor, &vec![1; len], offset);
        set(&tensor(0, 64), 256, 0).unwrap();
        set(&tensor(192, 16), 4, 60).unwrap();
        set(&tensor(256, 0), 0, 0).unwrap();
        for (offset, ne) in [(0, 65), (4, 64), (usize::MAX - 3, 1), (256, 1)] {
            let refused = set(&tensor(offset, ne), 0, 0);
            assert!(matches!(refused, Err(Error::OutsideBuffer { .. })), "{ne} elements at {offset}");
        }
        for (len, offset) in [(65, 0), (5, 60), (1, 64), (1, u64::MAX), (0, 65)] {
            let refused = set(&tensor(0, 16), len, offset);
            assert!(matches!(refused, Err(Error::OutsideTensor { .. })), "{len} bytes at {offset}");
            let refused = buffer.get_tensor(&tensor(0, 16), &mut vec![0; len], offset);
            assert!(matches!(refused, Err(Error::OutsideTensor { .. })));
            let refused = buffer.memset_tensor(&tensor(0, 16), 0, offset, len);
            assert!(matches!(refused, Err(Error::OutsideTensor { .. })));
        }
        let mut negative = tensor(0, 1);
        negative.ne[1] = -1;
        assert!(matches!(set(&negative, 0, 0), Err(Error::Extent(_))));
        let outside =
            TensorSpec { buffer: Some(&buffer), data: buffer.base() + 4, ..dense(F32, [64, 1, 1, 1]) };
        assert!(matches!(GraphBuilder::new().add_tensor(&outside), Err(Error::OutsideBuffer { .. })));
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn buffers_fill_and_copy() {
    each_cpu(|cpu| {
        let one = cpu.buffers.alloc_buffer(128).unwrap();
        let other = cpu.buffers.alloc_buffer(128).unwrap();
        let specs = place(&[dense(F32, [4, 1, 1, 1])], &one);
        let source = placed(&specs[0]);
        let target = Tensor { data: ptr::with_exposed_provenance_mut(other.base()), ..source.clone() };
        one.clear(0).unwrap();
        other.clear(0xff).unwrap();
        write(&one, &specs[0], &[1.0, 2.0, 3.0, 4.0]);
        one.memset_tensor(&source, 0, 4, 8).unwrap();
        assert_eq!(read(&one, &specs[0]), [1.0, 0.0, 0.0, 4.0]);
        assert_eq!(one.init_tensor(&source).unwrap(), Status::Success);
        assert!(other.cpy_tensor(&source, &one, &target).unwrap());
        let mut bytes = [0u8; 128];
        let all = Tensor { ne: [32, 1, 1, 1], ..target.clone() };
        other.get_tensor(&all, &mut bytes, 0).unwrap();
        assert_eq!(bytes[..16], *[1.0f32, 0.0, 0.0, 4.0].map(f32::to_le_bytes).concat());
        assert!(bytes[16..].iter().all(|&byte| byte == 0xff));

        let shorter = Tensor { ne: [3, 1, 1, 1], ..target.clone() };
        assert!(matches!(other.cpy_tensor(&source, &one, &shorter), Err(Error::LayoutsDiffer)));
        assert!(matches!(one.cpy_tensor(&source, &one, &target), Err(Error::OutsideBuffer { .. })));
        let shifted = Tensor { data: source.data.wrapping_byte_add(4), ..source.clone() };
        let overlap = one.cpy_tensor(&source, &one, &shifted);
        assert!(matches!(overlap, Err(Error::TensorsOverlap { nbytes: 16, apart: 4 })));
        assert!(one.cpy_tensor(&source, &one, &source).unwrap());
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn host_memory_is_used_and_its_buffer_freed() {
    each_cpu(|cpu| {
        #[repr(align(4096))]
        struct Page {
            _bytes: [u8; 4096],
        }
        let page = Box::into_raw(Box::new(Page { _bytes: [3; 4096] })).cast::<u8>();
        // SAFETY: the page outlives the buffers, and is reached through the pointer alone meanwhile.
        unsafe {
            for _ in 0..3 {
                let buffer = cpu.device.buffer_from_host_ptr(page, 4096, 4096).unwrap().unwrap();
                assert_eq!((buffer.base(), buffer.size()), (page.addr(), 4096));
                write(&buffer, &place(&[dense(F32, [1, 1, 1, 1])], &buffer)[0], &[1.5]);
                assert_eq!(page.cast::<f32>().read(), 1.5);
            }
            let misaligned = cpu.device.buffer_from_host_ptr(page.add(4), 64, 64);
            assert!(matches!(misaligned, Err(Error::Misaligned { .. })));
            assert!(cpu.device.buffer_from_host_ptr(page, 0, 0).unwrap().is_none());
            drop(Box::from_raw(page.cast::<Page>()));
        }
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn allocations_have_limits() {
    each_cpu(|cpu| {
        assert!(cpu.buffers.alloc_buffer(0).is_none());
        assert!(cpu.buffers.alloc_buffer(1 << 60).is_none());
        let mut builder = GraphBuilder::new();
        builder.add_tensor(&dense(Q4_0, [64, 3, 1, 1])).unwrap();
        let graph = builder.finish(&[], 0).unwrap();
        assert_eq!(cpu.buffers.alloc_size(graph.tensor(0).unwrap()).unwrap(), 108);
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn objects_outlive_what_made_them() {
    for path in cpu_libraries() {
        let library = open(&path);
        let again = open(&path);
        let Cpu { device, buffers, backend } = Cpu::new(&library);
        let buffer = buffers.alloc_buffer(1024).unwrap();
        drop((library, device, buffers));
        let specs = place(&[dense(F32, [2, 1, 1, 1]), operation(ADD, [2, 1, 1, 1], &[0, 0])], &buffer);
        write(&buffer, &specs[0], &[1.0, 2.0]);
        let mut held = graph(&specs, &[1]);
        let result = placed(&specs[1]);
        // The graph keeps the memory of a buffer that is dropped first.
        drop(buffer);
        assert_eq!(backend.graph_compute(&mut held), Status::Success);
        assert!(!result.data.is_null());
        drop(backend);
        drop(held);
        assert_eq!(again.registry().device_count(), 1);
    }
}

/// 100,000 computations of a graph that is built anew each time leave the process as large as it was.
#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn computing_again_takes_no_memory() {
    fn resident_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
    let cpu = Cpu::new(&open(&cpu_libraries()[0]));
    let buffer = cpu.buffers.alloc_buffer(1024).unwrap();
    let specs = place(&[dense(F32, [2, 1, 1, 1]), operation(ADD, [2, 1, 1, 1], &[0, 0])], &buffer);
    write(&buffer, &specs[0], &[1.0, 2.0]);
    let mut builder = GraphBuilder::new();
    let mut rounds = |count: usize| {
        for _ in 0..count {
            let mut next = std::mem::take(&mut builder);
            for spec in &specs {
                next.add_tensor(spec).unwrap();
            }
            let mut graph = next.finish(&[1], 0).unwrap();
            assert_eq!(cpu.backend.graph_compute(&mut graph), Status::Success);
            builder = graph.into_builder();
        }
    };
    rounds(1_000);
    let before = resident_kib();
    rounds(100_000);
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 1_024, "grown by {grown} KiB");
}

/// The table of types and the extent against what ggml itself says.
#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn types_are_ggmls() {
    use std::ffi::{CStr, c_char, c_int};
    for cpu in cpu_libraries() {
        // SAFETY: the functions are ggml's, with the types of its header, and get known types and whole tensors.
        unsafe {
            let base = libloading::Library::new(cpu.with_file_name("libggml-base.so")).unwrap();
            let name = base.get::<unsafe extern "C" fn(c_int) -> *const c_char>("ggml_type_name").unwrap();
            let block = base.get::<unsafe extern "C" fn(c_int) -> i64>("ggml_blck_size").unwrap();
            let size = base.get::<unsafe extern "C" fn(c_int) -> usize>("ggml_type_size").unwrap();
            let nbytes = base.get::<unsafe extern "C" fn(*const Tensor) -> usize>("ggml_nbytes").unwrap();
            for number in 0..43 {
                let known = TypeInfo::get(number);
                assert_eq!(known.is_some(), block(number as c_int) > 0, "type {number}");
                let Some(info) = known else { continue };
                assert_eq!(CStr::from_ptr(name(number as c_int)).to_str().unwrap(), info.name);
                assert_eq!(block(number as c_int), i64::from(info.block), "{}", info.name);
                assert_eq!(size(number as c_int), info.size as usize, "{}", info.name);
                let row = i64::from(info.block) * 3;
                for (ne, shift) in
                    [([row, 2, 3, 4], 0), ([row, 1, 1, 1], 0), ([row, 5, 1, 2], 64), ([row, 0, 1, 1], 0)]
                {
                    let mut nb = info.dense_strides(ne).unwrap();
                    nb[1] += shift;
                    let tensor = Tensor { type_: number, ne, nb, ..Tensor::default() };
                    assert_eq!(
                        extent(number, ne, nb),
                        Ok(nbytes(&raw const tensor) as u64),
                        "{} {ne:?}",
                        info.name
                    );
                }
            }
        }
    }
}
