use super::*;
use crate::backend::log::captured;
use apir_protocol::command::Command;
use apir_protocol::constants::FEATURE_NAMES;
use apir_protocol::graph::GraphReader;
use apir_protocol::messages::NamesReply;
use std::ffi::CStr;

fn asked(host: &Host, command: Command) -> usize {
    host.0.lock().unwrap().seen.iter().filter(|seen| **seen == command).count()
}

#[test]
fn names_carry_the_prefix_and_properties_are_modest() {
    let (device, _) = device(|script| {
        script.kind = 0;
        script.mmap_support = Some(false);
    });
    let pointer = device.as_ptr();
    let mut props = abi::DeviceProps::default();
    // SAFETY: the device has all functions.
    unsafe {
        let iface = (*pointer).iface;
        assert_eq!(CStr::from_ptr((iface.get_name.unwrap())(pointer)), c"[virtgpu] Fake");
        assert!(
            CStr::from_ptr((iface.get_description.unwrap())(pointer)).to_bytes().starts_with(b"A device")
        );
        assert_eq!((iface.get_type.unwrap())(pointer), 1);
        (iface.get_props.unwrap())(pointer, &raw mut props);
        assert_eq!(CStr::from_ptr(props.name), c"[virtgpu] Fake");
    }
    assert_eq!((props.memory_free, props.memory_total, props.type_), (5, 7, 1));
    assert!(props.device_id.is_null());
    assert_eq!(props.caps, abi::DeviceCaps::default());
}

#[test]
fn the_buffer_type_answers_in_both_layouts() {
    for api in [2, 3] {
        let (device, host) = device_of(api, |_| {});
        let pointer = device.buffer_type();
        // SAFETY: the buffer type is the device's own and has all functions.
        unsafe {
            let iface = device.layout.buffer_type_iface(pointer);
            assert_eq!(CStr::from_ptr((iface.get_name.unwrap())(pointer)), c"[virtgpu] FakeBuffers");
            assert_eq!((iface.get_alignment.unwrap())(pointer), 64);
            assert_eq!((iface.get_max_size.unwrap())(pointer), 1 << 30);
            assert_eq!(device.layout.buffer_type_device(pointer), device.as_ptr());
            let supports_buft = (*device.as_ptr()).iface.supports_buft.unwrap();
            assert!(supports_buft(device.as_ptr(), pointer));
            assert!(!supports_buft(device.as_ptr(), ptr::null_mut()));
        }
        assert!(Held::new(device, 64).is_some());
        assert_eq!(asked(&host, Command::BufferTypeGetAlignment), 1);
    }
}

#[test]
fn the_host_is_asked_once_for_each_content_and_not_for_trivial_operations() {
    let (device, host) = device(|_| {});
    let source = tensor(F32, [4, 1, 1, 1]);
    let mut node = abi::Tensor { op: ADD, ..tensor(F32, [4, 1, 1, 1]) };
    node.src[0] = (&raw const source).cast_mut();
    let mut same = node.clone();
    same.name[0] = b'x';
    assert!(supports(device, &node) && supports(device, &same));
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 1);
    same.op_params[3] = 1;
    assert!(supports(device, &same));
    same.src[1] = (&raw const source).cast_mut();
    assert!(supports(device, &same));
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 3);
    host.0.lock().unwrap().supports = false;
    for (op, answer) in [(NONE, true), (VIEW, true), (CUSTOM, false), (MUL_MAT, false)] {
        assert_eq!(supports(device, &abi::Tensor { op, ..node.clone() }), answer);
    }
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 4);
}

#[test]
fn a_node_with_ten_sources_and_a_view_can_be_asked_about() {
    let (device, host) = device(|script| script.supports = false);
    let source = tensor(F32, [4, 2, 3, 1]);
    let pointer = (&raw const source).cast_mut();
    let mut node = abi::Tensor { op: ADD, src: [pointer; 10], view_src: pointer, ..source.clone() };
    assert!(!supports(device, &node));
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 1);
    // What the host will not look at is not supported, and not asked about again.
    host.0.lock().unwrap().refused.insert(Command::DeviceSupportsOp, 1);
    node.src[9] = ptr::null_mut();
    assert!(!supports(device, &node) && !supports(device, &node));
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 2);
}

#[test]
fn tensors_beyond_32_bits_are_not_supported() {
    let (device, host) = device(|_| {});
    let wide = tensor(F32, [1 << 33, 1, 1, 1]);
    assert!(!supports(device, &abi::Tensor { op: ADD, ..wide.clone() }));
    assert!(supports(device, &abi::Tensor { op: VIEW, ..wide.clone() }));
    let mut node = abi::Tensor { op: ADD, ..tensor(F32, [4, 1, 1, 1]) };
    node.src[1] = (&raw const wide).cast_mut();
    assert!(!supports(device, &node));
    node.src[1] = ptr::null_mut();
    node.nb[3] = 1 << 33;
    assert!(supports(device, &node), "the stride of one element counts for nothing");
    node.ne[3] = 2;
    assert!(!supports(device, &node));
    node.ne[3] = -1;
    assert!(!supports(device, &node));
    assert_eq!(asked(&host, Command::DeviceSupportsOp), 1);
}

#[test]
fn sizes_are_asked_for_only_where_they_can_exceed_the_extent() {
    let (device, host) = device(|_| {});
    let size = |tensor: &abi::Tensor| {
        let pointer = device.buffer_type();
        // SAFETY: the buffer type is the device's own; the tensor is valid during the call.
        unsafe { (device.layout.buffer_type_iface(pointer).get_alloc_size.unwrap())(pointer, tensor) }
    };
    assert_eq!(size(&tensor(F32, [5, 1, 1, 1])), 20);
    assert_eq!(size(&tensor(Q4_0, [1024, 1, 1, 1])), 576);
    assert_eq!(asked(&host, Command::BufferTypeGetAllocSize), 0);
    let product = abi::Tensor { op: MUL_MAT, ..tensor(F32, [5, 1, 1, 1]) };
    assert_eq!((size(&product), size(&product)), (1000, 1000));
    assert_eq!(size(&tensor(Q4_0, [32, 1, 1, 1])), 1000);
    assert_eq!(size(&tensor(Q4_0, [96, 100, 1, 1])), 5400, "never less than the extent");
    assert_eq!(asked(&host, Command::BufferTypeGetAllocSize), 3);
    host.0.lock().unwrap().gone = true;
    assert_eq!(size(&tensor(Q4_0, [64, 1, 1, 1])), 36);
}

#[test]
fn t20_a_host_that_lies_about_the_size_of_a_tensor_does_not_end_the_program() {
    let (device, host) = device(|script| script.alloc_size = u64::MAX - 63);
    let size = |tensor: &abi::Tensor| {
        let pointer = device.buffer_type();
        // SAFETY: the buffer type is the device's own; the tensor is valid during the call.
        unsafe { (device.layout.buffer_type_iface(pointer).get_alloc_size.unwrap())(pointer, tensor) }
    };
    // ggml adds sizes up: thousands of these stay below its largest.
    assert_eq!(size(&tensor(Q4_0, [32, 1, 1, 1])), 1 << 46);
    // A buffer is made by the first answer; a larger one later would be an assertion of ggml's.
    host.0.lock().unwrap().refused.insert(Command::BufferTypeGetAllocSize, 1);
    let odd = tensor(Q4_0, [64, 1, 1, 1]);
    assert_eq!(size(&odd), 36);
    host.0.lock().unwrap().refused.clear();
    assert_eq!(size(&odd), 36);
}

#[test]
fn t20_a_host_whose_alignment_would_make_ggml_abort_is_refused() {
    let make = |alignment| {
        let (link, host) = FakeLink::new();
        host.0.lock().unwrap().alignment = alignment;
        let opener = Opener::new(forks_of(link));
        Device::make(opener, layout(3), BufferMaker::Boxes, own(), OnLost::Fail, ptr::null_mut())
    };
    for alignment in [0, 1, 64, 1 << 20] {
        assert_eq!(make(alignment).unwrap().attached().host.alignment as u64, alignment.max(1));
    }
    for alignment in [3, 6, 96, 1 << 21, 1 << 62, 1 << 63, u64::MAX] {
        let line = make(alignment).unwrap_err().to_string();
        assert!(line.contains(&format!("an alignment of {alignment} bytes")), "{line}");
    }
}

#[test]
fn t20_a_host_s_name_writes_nothing_but_its_letters_to_the_terminal() {
    let (device, _) = device(|script| script.name = format!("\x1b[31mF\u{202e}ake\r\n{}", "x".repeat(999)));
    let name = device.display_name();
    assert_eq!(name, format!("[virtgpu] [31mFake{}", "x".repeat(128 - 8)));
}

#[test]
fn a_lost_host_leaves_the_last_known_memory_and_one_line() {
    let (device, host) = device(|_| {});
    host.0.lock().unwrap().gone = true;
    captured::take();
    let (mut free, mut total) = (0, 0);
    // SAFETY: the device has all functions; the places are valid.
    unsafe { ((*device.as_ptr()).iface.get_memory.unwrap())(device.as_ptr(), &raw mut free, &raw mut total) };
    assert_eq!((free, total), (5, 7));
    // A "no" would make ggml abort the program; its computation fails instead.
    assert!(supports(device, &abi::Tensor { op: ADD, ..tensor(F32, [4, 1, 1, 1]) }));
    assert!(Held::new(device, 64).is_none());
    let mut node = tensor(F32, [4, 1, 1, 1]);
    assert_eq!(compute(device, &mut [&raw mut node]), -1);
    let lines = captured::take();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("host is gone"), "{lines:?}");
}

#[test]
fn t27_records_and_questions_have_the_host_s_numbers() {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let (device, host) = device(|script| {
        script.features = FEATURE_NAMES;
        script.names = Some(NamesReply {
            version: "0.99.0".to_owned(),
            ops: list(&["NONE", "NEW", "ADD", "VIEW", "GLU"]),
            unary: list(&["ABS"]),
            glu: list(&["NEW", "GEGLU"]),
            types: list(&["new", "f32", "f16"]),
        });
    });
    let buffer = Held::new(device, 1024).unwrap();
    let mut leaf = abi::Tensor { op: MUL_MAT, ..tensor(F32, [8, 1, 1, 1]) };
    buffer.place(&mut leaf, 0);
    let mut sum = abi::Tensor { op: ADD, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    sum.src[..2].fill(&raw mut leaf);
    buffer.place(&mut sum, 64);
    let mut unit = abi::Tensor { op: GLU, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    unit.op_params[0] = 1;
    unit.src[0] = &raw mut sum;
    buffer.place(&mut unit, 128);
    // What made a source is not asked about and does not travel: it need not be known on the host.
    assert!(supports(device, &sum) && supports(device, &unit));
    assert_eq!(compute(device, &mut [&raw mut sum, &raw mut unit]), 0);
    let graph = host.0.lock().unwrap().graph.clone();
    let tensors = GraphReader::parse(&graph).unwrap().tensors();
    let found: Vec<_> = tensors.map(|record| (record.op, record.type_, record.op_params[0])).collect();
    assert_eq!(found, [(0, 1, 0), (2, 1, 0), (4, 1, 1)]);

    let before = asked(&host, Command::DeviceSupportsOp);
    let product = abi::Tensor { op: MUL_MAT, src: sum.src, ..tensor(F32, [8, 1, 1, 1]) };
    let mut other_unit = abi::Tensor { op: GLU, src: unit.src, ..tensor(F32, [8, 1, 1, 1]) };
    other_unit.op_params[0] = 0;
    let quantized = abi::Tensor { op: ADD, src: sum.src, ..tensor(Q4_0, [32, 1, 1, 1]) };
    for missing in [&product, &other_unit, &quantized] {
        assert!(!supports(device, missing));
    }
    assert_eq!(asked(&host, Command::DeviceSupportsOp), before, "what the host lacks is not asked about");
    let mut product = abi::Tensor { flags: 16, ..product };
    buffer.place(&mut product, 256);
    assert_ne!(compute(device, &mut [&raw mut product]), 0);
}
